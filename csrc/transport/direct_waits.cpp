// How DirectTransport's host waits for its peers: for their words on the control page in agree(),
// and for their copies where programs run on the calling thread.
#include <sched.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "transport/cores.h"
#include "transport/direct_transport.h"

namespace pg_sdma {
namespace {

// Looks at a peer's bell, between two yields of a spinning rank: a microsecond's worth.
constexpr int kLooksPerYield = 20;

// Before the first yield of a rank that waits for a peer's copies: longer than a wave takes,
// because who yields to another program comes back only milliseconds later, with its peers waiting
// by then.
constexpr int kLooksBeforeYield = 400;

// How often a sleeping rank looks whether the one it waits for still lives.
constexpr std::chrono::milliseconds kLook{50};

// How often a rank that leaves looks at its device, which rings no bell.
constexpr std::chrono::milliseconds kLookForEnd{1};

// Tells the processor that this is a spin loop.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// How the host engine waits for a peer's counter.
class DirectTransport::HostWaiter final : public Waiter {
 public:
  HostWaiter(DirectTransport& self, const Call& call)
      : self_(self), call_(call), deadline_(self.started_ + call.timeout) {}

  void wait(Counter& counter, uint64_t value) override {
    if (counter.load() >= value) return;
    if (!comes_at_once(counter, value)) wait_long(counter, value);
  }
  void wrote() override { self_.page_.ring_bell(self_.options_.rank); }

 private:
  bool comes_at_once(const Counter& counter, uint64_t value) const {
    if (self_.options_.spin.count() == 0) return false;
    self_.leave_core_to(self_.page_.writer(counter));
    for (int i = 0; i < kLooksBeforeYield; ++i) {
      relax();
      if (counter.load() >= value) return true;
    }
    return false;
  }

  void wait_long(Counter& counter, uint64_t value) {
    const int rank = self_.page_.writer(counter);
    for (;;) {
      const uint32_t heard = self_.page_.bell(rank);
      if (counter.load() >= value) return;
      if (Clock::now() >= deadline_) {
        const int culprit = self_.furthest_behind(rank);
        const bool shares = self_.page_.filled(culprit) < self_.page_.filled(self_.options_.rank);
        self_.fail(self_.who_is_missing(
            call_, culprit, shares ? "has not finished sharing" : "has not finished copying"));
      }
      self_.await(rank, heard, deadline_);
    }
  }

  DirectTransport& self_;
  const Call& call_;
  const Deadline deadline_;
};

std::unique_ptr<Waiter> DirectTransport::waiter(const Call& call) {
  return std::make_unique<HostWaiter>(*this, call);
}

void DirectTransport::await(int rank, uint32_t heard, Deadline deadline) {
  const auto spin_until = std::min(Clock::now() + options_.spin, deadline);
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
  page_.tell_core(options_.rank, this_core());
  check_fault();
  check_peers();
}

// Two ranks on one core would take turns there for milliseconds, until the kernel moves one of
// them.
void DirectTransport::leave_core_to(int rank) {
  if (options_.spin.count() == 0 || page_.core(rank) != this_core()) return;
  std::vector<int> taken;
  for (int r = 0; r < options_.world; ++r) {
    if (r != options_.rank && page_.core(r) >= 0) taken.push_back(page_.core(r));
  }
  move_off(taken);
  page_.tell_core(options_.rank, this_core());
}

// The peers need this rank's memory, and its copies, until all is done.
void DirectTransport::drain() {
  if (!watchdog_ || watchdog_->idle()) return;
  std::string why;
  try {
    const std::shared_ptr<Queue::Marker> last = queue_->mark();
    while (!watchdog_->idle() && !page_.faulted() && !last->passed()) {
      std::this_thread::sleep_for(kLookForEnd);
    }
    return;
  } catch (const std::exception& error) {
    why = error.what();
  }
  // No wait of this device's is left that the watchdog would have to guard.
  watchdog_.reset();
  page_.set_fault(options_.rank, "rank " + std::to_string(options_.rank) + " left group " +
                                     options_.group +
                                     " with operations pending, because its device has failed "
                                     "(look at its output for the cause): " +
                                     why);
  if (options_.on_fault) options_.on_fault(page_.fault());
}

// All of them, not only the one that is waited for: that one may be late for another reason.
void DirectTransport::check_peers() {
  for (int rank = 0; rank < options_.world; ++rank) {
    const bool departed = page_.departed(rank);
    if (rank == options_.rank || (!departed && !peers_->gone(rank))) continue;
    // Read after its departure: what it did before that counts.
    const bool copies = engine_->stream_ordered() && !peers_->gone(rank);  // also once departed
    const bool needed =
        page_.consumed(rank) < number_ || (carrying_ && !copies && page_.done(rank) < number_);
    if (!needed) continue;
    fail(this_operation() + " waits for rank " + std::to_string(rank) +
         (departed ? ", which has destroyed the group or is exiting (look at its output). "
                   : ", whose process has ended (look at its output for the cause). ") +
         tell_progress(progress(), number_, engine_->stream_ordered(), Clock::now() - started_));
  }
}

}  // namespace pg_sdma
