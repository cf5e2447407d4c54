// DirectTransport measures what its device's copies take, and whether one in each direction at once
// takes longer: on some GPUs all copies to and from memory of other processes go through one
// engine.
#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

#include "transport/direct_transport.h"

namespace pg_sdma {
namespace {

// Long against what it costs to enqueue it and to notice its end.
constexpr std::chrono::duration<double> kLongEnough{200e-6};
constexpr int kMostCopies = 16;
constexpr int kTimes = 5;  // of which the fastest counts: others share the host

// Where one engine does all copies, both ways take twice the time of one.
constexpr double kAtOnce = 1.5;

}  // namespace

void DirectTransport::measure_copies(const Call& call) {
  const int peer = (options_.rank + 1) % options_.world;
  const Wave all = std::move(cut(call, SIZE_MAX).front());
  const Deadline end = Clock::now() + call.timeout;
  const std::unique_ptr<Waiter> waiting = waiter(call);
  // A wait that is over stands between two copies, so that the driver takes them one by one.
  const auto add = [&](int copies, bool push, uint32_t track) {
    for (int i = 0; i < copies; ++i) {
      program_.push_back(Step::wait(page_.ready(peer), number_).on(track));
      if (push) {
        copy_to(peer, call, all, track);
      } else {
        copy_from(peer, call, all, track);
      }
    }
  };
  const auto seconds = [&](int copies, bool both_ways) {
    program_.clear();
    // First, because what runs beside starts where the program has got to.
    if (both_ways) add(copies, /*push=*/false, Step::kBeside);
    add(copies, /*push=*/true, 0);
    const auto began = Clock::now();
    queue_->run(program_, *waiting);
    const std::shared_ptr<Queue::Marker> last = queue_->mark();
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
  copy_speed_.bytes_per_second = static_cast<double>(copies * call.shard_bytes()) / one_way;
  copy_speed_.both_ways_at_once = both_ways < kAtOnce * one_way;
}

}  // namespace pg_sdma
