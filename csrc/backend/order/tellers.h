// Threads that run what may be users' code: the callbacks of futures, which may make collectives of
// their own and wait for them.
//
// Callbacks run in the order in which their collectives ended, one at a time, so that collectives
// that they make come in the same order on every rank. What a callback makes has its callbacks one
// level deeper, where nothing waits for the level above. A callback that takes long, or waits for a
// collective of its own level, lets the next begin.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace pg_sdma {

class Tellers {
 public:
  Tellers();
  ~Tellers();
  Tellers(const Tellers&) = delete;
  Tellers& operator=(const Tellers&) = delete;

  // The level of what the calling thread makes: 0 outside of callbacks, 1 in one of level 0.
  static int level();
  // The calling callback is going to wait for a collective of its own level, or one above.
  static void step_aside();

  void run(int level, std::function<void()> task);

  // Ends the threads, once they have run what they were given. Those that are not done after
  // `grace`, or that call this, end later by themselves. Idempotent; no run() comes after it.
  void stop(std::chrono::milliseconds grace);

 private:
  struct State;
  const std::shared_ptr<State> state_;  // outlives this in a thread whose callback does
};

// Whether the calling thread is one of ours, on which the last reference to a tensor must not be
// dropped: Python may have finalised.
bool on_own_thread();
// Makes it one.
void be_own_thread();

}  // namespace pg_sdma
