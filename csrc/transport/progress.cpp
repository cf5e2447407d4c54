#include "transport/progress.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <tuple>

namespace pg_sdma {
namespace {

constexpr size_t kMostNamed = 8;  // the text of a fault is bounded

// 0: has not called, 1: has not started, 2: has not read all, 3: done.
int stage(const RankProgress& rank, uint64_t number, bool stream_ordered) {
  if (rank.finished >= number) return 3;
  if (rank.called < number) return 0;
  return stream_ordered && rank.started < number ? 1 : 2;
}

std::string where(const RankProgress& rank) {
  std::ostringstream text;
  if (rank.ended) text << "its process has ended, ";
  if (rank.departed) text << "it has destroyed the group, ";
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
    std::tie(progress.others, progress.other) = page.elsewhere(rank);
    progress.departed = page.departed(rank);
    progress.ended = peers.gone(rank);
    ranks.push_back(std::move(progress));
  }
  return ranks;
}

std::string tell_progress(const std::vector<RankProgress>& ranks, uint64_t number,
                          bool stream_ordered, std::chrono::duration<double> waited) {
  constexpr const char* behind[] = {"Not called by", "Called but not started by",
                                    "Not finished reading by"};
  std::ostringstream text;
  const RankProgress* culprit = nullptr;
  for (int at = 0; at < 3; ++at) {
    size_t named = 0;
    for (const RankProgress& rank : ranks) {
      if (stage(rank, number, stream_ordered) != at) continue;
      // Of those equally far behind, one that is no more comes first.
      const bool worse = culprit == nullptr ||
                         (stage(*culprit, number, stream_ordered) == at &&
                          std::tuple(!rank.ended, rank.called, rank.finished) <
                              std::tuple(!culprit->ended, culprit->called, culprit->finished));
      if (worse) culprit = &rank;
      if (++named > kMostNamed) continue;
      text << (named == 1 ? behind[at] : ",") << " rank " << rank.rank;
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
