// Tokens of PTX: words, with the points and colons in them, and single signs.
#pragma once
#include <string>
#include <vector>

namespace ptx {

struct Token {
  std::string text;
  int line;
};

// Returns those of a text, without comments.
std::vector<Token> tokens_of(const std::string& text);

}  // namespace ptx
