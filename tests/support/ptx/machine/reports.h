// Reports of one launch: each fault once for the instruction that shows it.
#pragma once
#include <set>
#include <string>
#include <vector>

namespace ptx {

class Reports {
 public:
  // `key` names the kind of fault and the instructions it is between.
  void add(const std::string& key, const std::string& sentence) {
    if (keys_.insert(key).second && sentences_.size() < MOST) sentences_.push_back(sentence);
  }
  const std::vector<std::string>& sentences() const { return sentences_; }

 private:
  static constexpr size_t MOST = 20;
  std::set<std::string> keys_;
  std::vector<std::string> sentences_;
};

}  // namespace ptx
