// Parser of PTX as Triton emits it: one kernel, its global constants, nested scopes of registers.
#include <algorithm>
#include <set>

#include "program.h"
#include "tokens.h"

namespace ptx {

const std::vector<std::string> SPECIAL = {
    "%tid.x",    "%tid.y",    "%tid.z",    "%ctaid.x", "%ctaid.y", "%ctaid.z",
    "%nctaid.x", "%nctaid.y", "%nctaid.z", "%ntid.x",  "%laneid",  "%warpid"};
int sink() { return int(SPECIAL.size()); }

namespace {

struct Scope {
  std::map<std::string, int> registers;
  std::map<std::string, int> ranges;  // `%r<5>`: the number of registers by the prefix
  std::map<std::string, int> labels;
};

class Parser {
 public:
  explicit Parser(const std::string& text) : tokens_(tokens_of(text)) {}

  std::unique_ptr<Program> parse() {
    program_ = std::make_unique<Program>();
    scopes_.emplace_back();
    for (const auto& name : SPECIAL) scopes_[0].registers[name] = program_->num_registers++;
    scopes_[0].registers["_"] = program_->num_registers++;
    while (at_ < tokens_.size() && text() != ".section") module_statement();
    if (program_->code.empty()) throw Error("there is no kernel in the PTX");
    return std::move(program_);
  }

 private:
  std::vector<Token> tokens_;
  size_t at_ = 0;
  std::unique_ptr<Program> program_;
  std::vector<Scope> scopes_;  // those that are open, the inmost last
  std::vector<int> branches_;  // whose labels are not known yet
  std::set<std::string> shared_;

  const std::string& text() const {
    if (at_ >= tokens_.size()) throw Error("the PTX ends in the middle of a statement");
    return tokens_[at_].text;
  }
  bool accept(const char* expected) { return text() == expected && ++at_; }
  std::string next() { return tokens_.at((text(), at_++)).text; }
  void expect(const char* expected) {
    if (!accept(expected)) unknown(std::string("where ") + expected + " belongs");
  }
  [[noreturn]] void unknown(const std::string& what) const {
    throw Error("line " + std::to_string(tokens_[at_].line) + " has " + tokens_[at_].text + " " +
                what + "; the emulator does not know it");
  }
  void skip_line() {
    for (int line = tokens_[at_].line; at_ < tokens_.size() && tokens_[at_].line == line;) at_++;
  }
  void skip_to(const char* last) { while (next() != last) {} }

  void module_statement() {
    for (auto directive : {".version", ".target", ".address_size", ".file"})
      if (text() == directive) return skip_line();
    std::string space;
    for (; text()[0] == '.' && text() != ".entry"; at_++) {
      if (text() == ".align") at_++;
      if (text() == ".shared" || text() == ".global" || text() == ".const") space = text();
      if (text() == ".func") unknown("at the top");
      if (text()[1] == 'b' || text()[1] == 'u')
        element_bytes_ = size_of(TYPES.at(text().substr(1)));
    }
    if (accept(".entry")) return entry();
    if (space == ".shared") { shared_.insert(next()); return skip_to(";"); }
    if (space.empty()) unknown("at the top");
    global_constant();
  }

  int element_bytes_ = 1;

  void global_constant() {
    auto constant = std::make_unique<Constant>();
    constant->name = next();
    expect("[");
    constant->data.resize(std::stoul(next()) * element_bytes_);
    expect("]");
    if (accept("=")) {
      expect("{");
      for (size_t i = 0; !accept("}"); i += element_bytes_) {
        u64 value = std::stoull(next(), nullptr, 0);
        memcpy(&constant->data.at(i), &value, element_bytes_);
        accept(",");
      }
    }
    expect(";");
    program_->constants.push_back(std::move(constant));
  }

  void entry() {
    program_->name = next();
    expect("(");
    while (!accept(")")) parameter();
    while (text() != "{") at_++;  // .reqntid, .maxnreg
    block();
    Instruction end;
    end.text = "ret";
    end.words = {"ret"};
    decode(end);
    program_->code.push_back(end);
  }

  void parameter() {
    int size = 0, alignment = 0;
    expect(".param");
    while (text()[0] == '.') {
      std::string word = next().substr(1);
      if (word == "align") alignment = std::stoi(next());
      else if (TYPES.count(word) && !size) size = size_of(TYPES.at(word));
    }
    std::string name = next();
    if (accept("[")) { size = std::stoi(next()); expect("]"); } else alignment = size;
    int& total = program_->parameter_bytes;
    total = (total + alignment - 1) / alignment * alignment;
    program_->parameters.push_back({name, total, size});
    total += size;
    accept(",");
  }

  void block() {
    expect("{");
    scopes_.emplace_back();
    size_t first = branches_.size();
    while (!accept("}")) body_statement();
    // Labels of this scope are known now; branches to others are left to the scopes around it.
    auto& labels = scopes_.back().labels;
    for (size_t i = first; i < branches_.size();) {
      Instruction& branch = program_->code[branches_[i]];
      auto label = labels.find(branch.operands[0].text);
      if (label == labels.end()) { i++; continue; }
      branch.target = label->second;
      branches_.erase(branches_.begin() + i);
    }
    scopes_.pop_back();
    if (scopes_.size() == 1 && !branches_.empty())
      throw Error("a branch leads to no label: " + program_->code[branches_[0]].text);
  }

  void body_statement() {
    if (text() == "{") return block();
    if (text() == ".loc" || text() == ".file") return skip_line();
    if (accept(".reg")) return registers();
    if (accept(".pragma")) return skip_to(";");
    if (text()[0] == '.') unknown("in a kernel");
    if (at_ + 1 < tokens_.size() && tokens_[at_ + 1].text == ":") {
      scopes_.back().labels[next()] = int(program_->code.size());
      at_++;
      return;
    }
    instruction();
  }

  void registers() {
    at_++;  // their type
    do {
      std::string name = next();
      if (accept("<")) { scopes_.back().ranges[name] = std::stoi(next()); expect(">"); }
      else scopes_.back().registers[name] = program_->num_registers++;
    } while (accept(","));
    expect(";");
  }

  void instruction() {
    Instruction in;
    in.line = tokens_[at_].line;
    size_t first = at_;
    if (accept("@")) {
      in.is_guard_negated = accept("!");
      in.guard = find_register(next());
      if (in.guard < 0) unknown("as a guard");
    }
    in.words = words_of(next());
    if (text() != ";")
      do in.operands.push_back(operand()); while (accept(","));
    for (size_t i = first; i < at_; i++) in.text += (i == first ? "" : " ") + tokens_[i].text;
    expect(";");
    decode(in);
    if (in.words[0] == "bra") branches_.push_back(int(program_->code.size()));
    program_->code.push_back(in);
  }

  static std::vector<std::string> words_of(const std::string& opcode) {
    std::vector<std::string> words(1);
    for (char c : opcode)
      if (c == '.') words.emplace_back(); else words.back() += c;
    return words;
  }

  static void decode(Instruction& in) {
    for (const auto& word : in.words) {
      auto type = TYPES.find(word);
      if (type == TYPES.end()) continue;
      (in.type == Type::None ? in.type : in.second_type) = type->second;
    }
    in.flushes = in.has("ftz");
    for (auto decoder : {decode_arithmetic, decode_bits, decode_conversion, decode_control,
                         decode_memory, decode_matrix, decode_warpgroup, decode_copies}) {
      decoder(in);
      if (in.execute) return;
    }
    throw Error("line " + std::to_string(in.line) + " has " + in.text +
                "; the emulator does not know this instruction");
  }

  Operand operand() {
    size_t first = at_;
    Operand made;
    if (accept("{")) {
      made.kind = Operand::Vector;
      while (!accept("}")) { made.parts.push_back(operand()); accept(","); }
    } else if (accept("[")) {
      made = address();
    } else {
      made = simple();
      if (accept("|")) made.second = find_register(next());
    }
    made.text.clear();
    for (size_t i = first; i < at_; i++) made.text += tokens_[i].text;
    return made;
  }

  Operand address() {
    Operand made = simple();
    if (made.kind != Operand::Parameter) made.kind = Operand::Address;
    if (accept("+")) made.offset += std::stoll(next(), nullptr, 0);
    if (accept("-")) made.offset -= std::stoll(next(), nullptr, 0);
    while (accept(",")) made.parts.push_back(operand());
    expect("]");
    return made;
  }

  Operand simple() {
    Operand made;
    bool is_negative = accept("-");
    std::string name = next();
    made.text = name;
    if (isdigit(u8(name[0]))) {
      u64 value = number(name);
      made.index = literal(is_negative ? -value : value);
    } else if (int found = find_register(name); found >= 0) {
      made.index = found;
    } else if (shared_.count(name)) {
      made.index = literal(SHARED_BASE);
    } else if (const Parameter* parameter = find(program_->parameters, name)) {
      made.kind = Operand::Parameter;
      made.offset = parameter->offset;
    } else if (auto constant = find_constant(name)) {
      made.index = literal(u64(constant->data.data()));
    } else {
      if (name[0] == '!' || name[0] == '%') { at_--; unknown("as an operand"); }
      made.kind = Operand::Label;
    }
    return made;
  }

  static u64 number(const std::string& name) {
    char kind = name.size() > 1 ? name[1] : ' ';
    if (name[0] == '0' && (kind == 'f' || kind == 'F' || kind == 'd' || kind == 'D'))
      return std::stoull(name.substr(2), nullptr, 16);
    return std::stoull(name, nullptr, 0);
  }

  int literal(u64 value) {
    auto [found, is_new] = program_->literals.try_emplace(value, program_->num_registers);
    program_->num_registers += is_new;
    return found->second;
  }

  static const Parameter* find(const std::vector<Parameter>& all, const std::string& name) {
    for (auto& each : all) if (each.name == name) return &each;
    return nullptr;
  }
  const Constant* find_constant(const std::string& name) const {
    for (auto& each : program_->constants) if (each->name == name) return each.get();
    return nullptr;
  }

  // Returns the register of a name in the scopes that are open, or -1.
  int find_register(const std::string& name) {
    size_t digits = name.find_last_not_of("0123456789") + 1;
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (auto found = scope->registers.find(name); found != scope->registers.end())
        return found->second;
      auto range = scope->ranges.find(name.substr(0, digits));
      if (digits < name.size() && range != scope->ranges.end() &&
          std::stoi(name.substr(digits)) < range->second)
        return scope->registers[name] = program_->num_registers++;
    }
    return -1;
  }
};

}  // namespace

bool Instruction::has(const char* word) const {
  return std::find(words.begin(), words.end(), word) != words.end();
}

bool Instruction::begins_with(const char* first, const char* second) const {
  return words.size() > 1 && words[0] == first && words[1] == second;
}

std::unique_ptr<Program> parse(const std::string& text) { return Parser(text).parse(); }

}  // namespace ptx
