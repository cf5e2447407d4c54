// Whether gathers through slots or by pulls are faster here and now, found out by doing them.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <limits>

namespace pg_sdma {

// Slots are faster where every rank runs, and far slower where other programs, or the callers' own
// threads, take cores away: ranks then wait for each other at every wave. So a rank keeps the time
// that either way takes, for each size of shard by itself, and after slow calls asks for pulls
// for a while: twice as long each time, until slots are the faster way again.
class Preference {
 public:
  // Whether to ask for a pull of a shard of so many bytes. Once for each call.
  bool prefers_pull(size_t shard);
  // What a call took, by the way that all ranks took.
  void note(size_t shard, bool pulled, std::chrono::duration<double> took);

 private:
  static constexpr int kFirstPulls = 4;
  static constexpr int kMostPulls = 64;

  // Of shards of one size, to a factor of two. Times are seconds a byte.
  struct Size {
    double slots = 0;  // quick to believe a fast call, slow to believe a slow one
    double fastest = std::numeric_limits<double>::max();  // through slots
    double pulls = 0;                                     // 0: not known
    int pulls_left = 0;
    int next_pulls = kFirstPulls;
  };

  Size& of(size_t shard);

  std::array<Size, std::numeric_limits<size_t>::digits + 1> sizes_{};
};

}  // namespace pg_sdma
