#include "tokens.h"

#include <cctype>

namespace ptx {
namespace {

bool is_word(char c) { return isalnum((unsigned char)(c)) || c == '_' || c == '$' || c == '%' || c == '.'; }

}  // namespace

std::vector<Token> tokens_of(const std::string& text) {
  std::vector<Token> tokens;
  int line = 1;
  for (size_t i = 0; i < text.size();) {
    char c = text[i];
    if (c == '\n') line++;
    if (isspace((unsigned char)(c))) { i++; continue; }
    if (text.compare(i, 2, "//") == 0) { while (i < text.size() && text[i] != '\n') i++; continue; }
    size_t begin = i;
    if (c == '"') {
      i = text.find('"', i + 1) + 1;
    } else if (is_word(c)) {
      while (i < text.size() && (is_word(text[i]) || text.compare(i, 2, "::") == 0))
        i += is_word(text[i]) ? 1 : 2;
    } else {
      i++;
    }
    tokens.push_back({text.substr(begin, i - begin), line});
  }
  return tokens;
}

}  // namespace ptx
