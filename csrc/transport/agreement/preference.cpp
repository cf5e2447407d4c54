#include "transport/agreement/preference.h"

#include <algorithm>
#include <bit>

namespace pg_sdma {
namespace {

constexpr double kWeight = 0.25;  // of the last call in a mean
// So many times the fastest call through slots is slow enough to find out what a pull takes.
constexpr double kSuspicious = 2;

double mean(double before, double last) {
  return before == 0 ? last : before + (last - before) * kWeight;
}

}  // namespace

Preference::Size& Preference::of(size_t shard) {
  return sizes_[static_cast<size_t>(std::bit_width(shard))];
}

bool Preference::prefers_pull(size_t shard) {
  Size& size = of(shard);
  if (size.pulls_left == 0) return false;
  --size.pulls_left;
  return true;
}

void Preference::note(size_t shard, bool pulled, std::chrono::duration<double> took) {
  Size& size = of(shard);
  const double cost = took.count() / static_cast<double>(std::max<size_t>(shard, 1));
  if (pulled) {
    size.pulls = mean(size.pulls, cost);
    if (size.pulls >= size.slots) size.pulls_left = 0;
    return;
  }
  size.slots = std::min(cost, mean(size.slots, cost));
  size.fastest = std::min(size.fastest, cost);
  const bool slow = size.pulls == 0 ? cost > size.fastest * kSuspicious : size.slots > size.pulls;
  size.pulls_left = slow ? size.next_pulls : 0;
  size.next_pulls = slow ? std::min(2 * size.next_pulls, kMostPulls) : kFirstPulls;
}

}  // namespace pg_sdma
