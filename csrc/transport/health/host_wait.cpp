#include "transport/health/host_wait.h"

#include <sched.h>

#include <algorithm>
#include <vector>

#include "transport/health/cores.h"

namespace pg_sdma {
namespace {

// Looks at a peer's bell, between two yields of a spinning rank: a microsecond's worth.
constexpr int kLooksPerYield = 20;

// Before the first yield of a rank that waits for a peer's copies: longer than a chunk takes,
// because who yields to another program comes back only milliseconds later, with its peers waiting
// by then.
constexpr int kLooksBeforeYield = 400;

// How often a sleeping rank looks whether the one it waits for still lives.
constexpr std::chrono::milliseconds kLook{50};

// Tells the processor that this is a spin loop.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void HostWait::await(int rank, uint32_t heard, Clock::time_point deadline,
                     const Operation& operation, bool under_way) {
  const auto spin_until = std::min(Clock::now() + spin_, deadline);
  // Yielding costs nothing while nobody else is ready, and lets in whoever the peer waits for.
  leave_core_to(rank);
  do {
    for (int i = 0; i < kLooksPerYield; ++i) {
      if (page_.bell(rank) != heard) return;
      relax();
    }
    sched_yield();
  } while (Clock::now() < spin_until);

  const auto left = std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now());
  if (left.count() <= 0) return;
  page_.sleep(rank, heard, std::min<std::chrono::microseconds>(left, kLook));
  page_.tell_core(self_.rank, this_core());
  health_.check_fault();
  health_.check_peers(operation, under_way);
}

void HostWait::leave_core_to(int rank) {
  if (!spins() || page_.core(rank) != this_core()) return;
  std::vector<int> taken;
  for (int r = 0; r < self_.world; ++r) {
    if (r != self_.rank && page_.core(r) >= 0) taken.push_back(page_.core(r));
  }
  move_off(taken);
  page_.tell_core(self_.rank, this_core());
}

void CounterWait::wait(Counter& counter, uint64_t value) {
  if (counter.load() >= value) return;
  if (!comes_at_once(counter, value)) wait_long(counter, value);
}

bool CounterWait::comes_at_once(const Counter& counter, uint64_t value) const {
  if (!host_.spins()) return false;
  host_.leave_core_to(page_.writer(counter));
  for (int i = 0; i < kLooksBeforeYield; ++i) {
    relax();
    if (counter.load() >= value) return true;
  }
  return false;
}

void CounterWait::wait_long(const Counter& counter, uint64_t value) {
  const int rank = page_.writer(counter);
  for (;;) {
    const uint32_t heard = page_.bell(rank);
    if (counter.load() >= value) return;
    if (Clock::now() >= operation_.deadline()) {
      const int culprit = furthest_behind(rank);
      const bool shares = page_.filled(culprit) < page_.filled(self_.rank);
      health_.fail(health_.timed_out(
          operation_, culprit, shares ? "has not finished sharing" : "has not finished copying"));
    }
    host_.await(rank, heard, operation_.deadline(), operation_, /*under_way=*/true);
  }
}

int CounterWait::furthest_behind(int rank) const {
  // Who waits for a peer's buffer has filled more of its own.
  for (int peer = 0; peer < self_.world; ++peer) {
    const bool behind = page_.filled(peer) < page_.filled(rank);
    if (page_.done(peer) < operation_.number && behind) rank = peer;
  }
  return rank;
}

}  // namespace pg_sdma
