// Checks of the device engine on the stand-in. CHECK(name) { ... } defines one.
#pragma once

#include <map>
#include <string>

#include "group.h"

namespace standin_test {

inline std::map<std::string, void (*)()>& all_checks() {
  static std::map<std::string, void (*)()> checks;
  return checks;
}

#define CHECK(name)                                                               \
  static void name();                                                             \
  static const bool registered_##name = all_checks().emplace(#name, name).second; \
  static void name()

inline std::string driver_path;

// The engine of a device, whose context is then current here, with a caller's stream on it.
inline std::shared_ptr<pg_sdma::Engine> engine_on(int device) {
  auto engine = engine_by(driver_path, device);
  enter(device);
  return engine;
}

// Why the engine would not; empty when it would.
template <class Function>
std::string refusal(Function function) {
  try {
    function();
  } catch (const pg_sdma::CannotShare& error) {
    return error.what();
  }
  return "";
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace standin_test
