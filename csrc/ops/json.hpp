// Just enough JSON to report facts: values are written as they come, objects and arrays nest as text.
#pragma once

#include <string>
#include <vector>

namespace fast_cp {

inline std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

class JsonObject {
 public:
  JsonObject& add(const std::string& key, const std::string& text) { return raw(key, json_text(text)); }
  JsonObject& add(const std::string& key, const char* text) { return raw(key, json_text(text)); }
  JsonObject& add(const std::string& key, bool value) { return raw(key, value ? "true" : "false"); }
  JsonObject& add(const std::string& key, int64_t value) { return raw(key, std::to_string(value)); }
  JsonObject& add(const std::string& key, int value) { return add(key, int64_t{value}); }
  JsonObject& raw(const std::string& key, const std::string& json) {
    body_ += (body_.empty() ? "" : ", ") + json_text(key) + ": " + json;
    return *this;
  }
  std::string str() const { return "{" + body_ + "}"; }

 private:
  std::string body_;
};

inline std::string json_array(const std::vector<std::string>& items) {
  std::string out;
  for (const std::string& item : items) out += (out.empty() ? "" : ", ") + item;
  return "[" + out + "]";
}

}  // namespace fast_cp
