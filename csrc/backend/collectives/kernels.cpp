#include "backend/collectives/kernels.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "backend/collectives/arguments.h"

namespace pg_sdma::kernels {
namespace {

// A kernel, or why there is none.
using Found = std::variant<Kernel, std::string>;

// None of it is destroyed: threads may still ask while the process ends.
std::mutex& mutex = *new std::mutex;
std::map<Key, Found>& known = *new std::map<Key, Found>;
Compiler& compiler = *new Compiler;

Found compile(const Key& key) {
  if (!compiler) return "no compiler of kernels";
  try {
    if (const std::optional<Kernel> kernel = compiler(key)) return *kernel;
  } catch (const std::runtime_error& error) {
    return say("no kernel: ", first_line(error.what()));
  }
  throw std::runtime_error("a kernel has yet to be compiled while a graph is captured");
}

}  // namespace

void set_compiler(Compiler given) { compiler = std::move(given); }

Kernel find(const Key& key) {
  std::optional<Found> found;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (const auto at = known.find(key); at != known.end()) found = at->second;
  }
  if (!found) {
    // Without the lock: whoever compiles may be waiting for a thread that comes here. Two may then
    // compile the same, and one of the two is kept.
    found = compile(key);
    std::lock_guard<std::mutex> lock(mutex);
    found = known.emplace(key, *found).first->second;
  }
  if (const auto* why = std::get_if<std::string>(&*found)) throw std::runtime_error(*why);
  return std::get<Kernel>(*found);
}

}  // namespace pg_sdma::kernels
