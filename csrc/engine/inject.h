// Faults on purpose, for tests: named points at which a rank can be made to refuse, die, come late
// or get wrong bytes. Compiled in and off; one load and a branch where nothing is injected.
#pragma once

#include <atomic>
#include <string>

namespace pg_sdma::inject {

// `plan`: "<point>=<action>[#<n>]", several separated by commas; "" injects nothing any more. With
// #n the action is taken at the n-th time that this process comes to the point, else every time.
// Actions:
//   refuse        throws CannotShare
//   die           SIGKILL
//   stop          SIGSTOP
//   late:<s>      sleeps for so many seconds
//   corrupt       what corrupts() is asked for
// Points: see kPoints in inject.cpp. Throws std::invalid_argument. Not while a group is in use.
void configure(const std::string& plan);

namespace detail {
extern std::atomic<bool> armed;
void act(const char* point);
bool corrupts(const char* point);
}  // namespace detail

// Takes the action planned for `point`, if any.
inline void at(const char* point) {
  if (detail::armed.load(std::memory_order_relaxed)) detail::act(point);
}

// Whether what `point` stands for is to go wrong.
inline bool corrupts(const char* point) {
  return detail::armed.load(std::memory_order_relaxed) && detail::corrupts(point);
}

}  // namespace pg_sdma::inject
