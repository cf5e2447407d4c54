#include "engine/inject.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace pg_sdma::inject {
namespace {

constexpr std::array kPoints = {
    "host",    // corrupt: this rank seems to be on another host
    "engine",  // making the engine
    "memfd",   // making the control page, on rank 0
    "attach",  // mapping it, on the others
    "join",    // posting the record, at construction
    "voted-engine", "voted-mapped", "voted-tested",  // before posting the answer to a step
    "self-test",                                     // corrupt: a byte arrives wrong
    "export",                                        // making a tensor reachable
    "watch",                                         // holding the peers' processes, in the vote
    "import",                                        // opening a peer's export
    "agree",                                         // before a gather is published
    "carry",                                         // after its verdict, before its copies
};

struct Injection {
  std::string point;
  std::string action;
  double seconds = 0;
  int only = 0;  // 0: every time
  int come = 0;
};

std::mutex mutex;
std::vector<Injection>& injections() {
  static auto* all = new std::vector<Injection>();
  return *all;
}

[[noreturn]] void bad(const std::string& part, const char* why) {
  throw std::invalid_argument("PG_SDMA_INJECT: '" + part + "': " + why);
}

Injection parse(const std::string& part) {
  Injection made;
  std::string rest = part;
  const size_t equals = rest.find('=');
  if (equals == std::string::npos) bad(part, "expected <point>=<action>");
  made.point = rest.substr(0, equals);
  rest = rest.substr(equals + 1);
  if (const size_t hash = rest.find('#'); hash != std::string::npos) {
    made.only = std::atoi(rest.c_str() + hash + 1);
    if (made.only <= 0) bad(part, "expected a count from 1 after '#'");
    rest = rest.substr(0, hash);
  }
  if (const size_t colon = rest.find(':'); colon != std::string::npos) {
    made.seconds = std::atof(rest.c_str() + colon + 1);
    rest = rest.substr(0, colon);
  }
  made.action = rest;
  if (std::none_of(kPoints.begin(), kPoints.end(),
                   [&](const char* point) { return made.point == point; })) {
    bad(part, "no such point");
  }
  constexpr std::array actions = {"refuse", "die", "stop", "late", "corrupt"};
  if (std::none_of(actions.begin(), actions.end(),
                   [&](const char* action) { return made.action == action; })) {
    bad(part, "no such action");
  }
  if (made.action == "late" && made.seconds <= 0) bad(part, "late:<seconds> needs seconds above 0");
  return made;
}

// The injection whose turn it is at `point`.
bool due(const char* point, Injection& found) {
  std::lock_guard<std::mutex> lock(mutex);
  for (Injection& injection : injections()) {
    if (injection.point != point) continue;
    ++injection.come;
    if (injection.only != 0 && injection.only != injection.come) continue;
    found = injection;
    return true;
  }
  return false;
}

}  // namespace

std::atomic<bool> detail::armed{false};

void configure(const std::string& plan) {
  static auto* last = new std::string();
  std::vector<Injection> parsed;
  std::istringstream parts(plan);
  for (std::string part; std::getline(parts, part, ',');) parsed.push_back(parse(part));
  std::lock_guard<std::mutex> lock(mutex);
  if (plan == *last) return;  // another group of this process: what was counted counts
  *last = plan;
  injections() = std::move(parsed);
  detail::armed = !injections().empty();
}

void detail::act(const char* point) {
  Injection injection;
  if (!due(point, injection)) return;
  if (injection.action == "refuse") {
    throw CannotShare(std::string(point) + " refused on purpose (PG_SDMA_INJECT)");
  }
  if (injection.action == "die") kill(getpid(), SIGKILL);
  if (injection.action == "stop") kill(getpid(), SIGSTOP);
  if (injection.action == "late") {
    std::this_thread::sleep_for(std::chrono::duration<double>(injection.seconds));
  }
}

bool detail::corrupts(const char* point) {
  Injection injection;
  return due(point, injection) && injection.action == "corrupt";
}

}  // namespace pg_sdma::inject
