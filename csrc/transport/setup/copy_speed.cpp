#include "transport/setup/copy_speed.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace pg_sdma {
namespace {

// Long against what it costs to enqueue it and to notice its end.
constexpr std::chrono::duration<double> kLongEnough{200e-6};
constexpr int kMostCopies = 16;
constexpr int kTimes = 5;  // of which the fastest counts: others share the host

// Where one engine does all copies, both ways take twice the time of one.
constexpr double kAtOnce = 1.5;

class NoWaiter final : public Waiter {
  void wait(Counter&, uint64_t) override {}
  void wrote() override {}
};

}  // namespace

CopySpeed measure_copies(DirectTransport& transport, const Operation& operation) {
  const Membership& self = transport.membership();
  ProgramWriter write(transport.page(), self.rank, self.world, operation);
  const int peer = write.peer(1);
  const Parts all = std::move(cut(operation.exchange.sizes, SIZE_MAX).front());
  const Clock::time_point end = Clock::now() + operation.timeout;
  NoWaiter no_waiter;
  // A wait that is over stands between two copies, so that the driver takes them one by one.
  const auto add = [&](int copies, bool push, uint32_t track) {
    for (int i = 0; i < copies; ++i) {
      write.await_ready(peer, track);
      if (push) {
        write.write(peer, all, track);
      } else {
        write.read(peer, all, track);
      }
    }
  };
  const auto seconds = [&](int copies, bool both_ways) {
    // First, because what runs beside starts where the program has got to.
    if (both_ways) add(copies, /*push=*/false, Step::kBeside);
    add(copies, /*push=*/true, 0);
    const Program program = write.take();
    const auto began = Clock::now();
    transport.queue().run(program, no_waiter);
    const std::shared_ptr<Queue::Marker> last = transport.queue().mark();
    while (!last->passed()) {
      if (Clock::now() >= end) throw std::runtime_error("copies to measure have not ended");
    }
    return std::chrono::duration<double>(Clock::now() - began).count();
  };
  int copies = 1;
  while (copies < kMostCopies && seconds(copies, false) < kLongEnough.count()) {
    copies *= 2;
  }
  double one_way = std::numeric_limits<double>::max();
  double both_ways = one_way;
  for (int i = 0; i < kTimes; ++i) {
    one_way = std::min(one_way, seconds(copies, false));
    both_ways = std::min(both_ways, seconds(copies, true));
  }
  const std::vector<size_t>& sizes = operation.exchange.sizes;
  const auto bytes = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
  return {static_cast<double>(copies * bytes) / one_way, both_ways < kAtOnce * one_way};
}

}  // namespace pg_sdma
