#include "transport/health/progress.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <tuple>

namespace pg_sdma {
namespace {

constexpr size_t kMostNamed = 8;  // the text of a fault is bounded

// What ranks are behind with, in order.
constexpr const char* kBehind[] = {"Not called by", "Called but not started by",
                                   "Not finished sharing by", "Not finished copying by"};
constexpr int kDone = 4;

// An index of kBehind, or kDone. `filled`: the most waves that a rank has put into its slots. One
// with fewer holds the others up.
int stage(const RankProgress& rank, uint64_t number, uint64_t filled, bool stream_ordered) {
  if (rank.finished >= number) return kDone;
  if (rank.called < number) return 0;
  if (stream_ordered && rank.started < number) return 1;
  return rank.filled < filled ? 2 : 3;
}

std::string where(const RankProgress& rank) {
  std::ostringstream text;
  if (rank.ended) text << "its process has ended, ";
  if (rank.departed) text << "it has destroyed the group or is exiting, ";
  text << "it is at operation " << rank.called;
  if (rank.others > 0) {
    text << ", the last of its " << rank.others << " other collectives is " << rank.other;
  }
  return text.str();
}

}  // namespace

std::vector<RankProgress> read_progress(const ControlPage& page, const Peers& peers, int world) {
  std::vector<RankProgress> ranks;
  for (int rank = 0; rank < world; ++rank) {
    RankProgress progress;
    progress.rank = rank;
    progress.called = page.called(rank);
    progress.started = page.ready(rank);
    progress.finished = page.done(rank);
    progress.filled = page.filled(rank);
    std::tie(progress.others, progress.other) = page.elsewhere(rank);
    progress.departed = page.departed(rank);
    progress.ended = peers.gone(rank);
    ranks.push_back(std::move(progress));
  }
  return ranks;
}

std::string tell_progress(const std::vector<RankProgress>& ranks, uint64_t number,
                          bool stream_ordered, std::chrono::duration<double> waited) {
  uint64_t filled = 0;
  for (const RankProgress& rank : ranks) filled = std::max(filled, rank.filled);
  std::ostringstream text;
  const RankProgress* culprit = nullptr;
  for (int at = 0; at < kDone; ++at) {
    size_t named = 0;
    for (const RankProgress& rank : ranks) {
      if (stage(rank, number, filled, stream_ordered) != at) continue;
      // Of those equally far behind, one that is no more comes first.
      const bool worse =
          culprit == nullptr ||
          (stage(*culprit, number, filled, stream_ordered) == at &&
           std::tuple(!rank.ended, rank.called, rank.finished, rank.filled) <
               std::tuple(!culprit->ended, culprit->called, culprit->finished, culprit->filled));
      if (worse) culprit = &rank;
      if (++named > kMostNamed) continue;
      text << (named == 1 ? kBehind[at] : ",") << " rank " << rank.rank;
      if (at == 0) text << " (" << where(rank) << ")";
    }
    if (named > kMostNamed) text << " and " << named - kMostNamed << " more";
    if (named > 0) text << ". ";
  }
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.1f", waited.count());
  text << "Outstanding for " << seconds << " s.";
  if (culprit != nullptr) text << " Culprit: rank " << culprit->rank << ".";
  return text.str();
}

}  // namespace pg_sdma
