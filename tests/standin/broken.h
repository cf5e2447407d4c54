// Drivers that do not do what they say. STANDIN_FAULT=kind[:from[:to]], for copies from or to peers
// of `from` to `to` bytes (all):
//   silent   are never made
//   late     land when the next such copy starts
//   local    take this process's own memory for the peer's
//   stuck    never end
//   early    waits do not wait, after the first `from` (0) of them
#pragma once

#include <cstdint>

#include "standin.h"

namespace standin {

void read_broken(const char* plan);  // null: none

// What becomes of a copy.
struct CopyPlan {
  enum class Does { kCopy, kNothing, kHang } does = Does::kCopy;
  pg_sdma::driver::Address destination = 0;
  pg_sdma::driver::Address source = 0;
};
// Before it is made.
CopyPlan plan_copy(pg_sdma::driver::Address destination, pg_sdma::driver::Address source,
                   size_t bytes);
bool waits_are_broken();  // from now on; then they are over before enqueuing them returns
bool next_wait_ends_early();

}  // namespace standin
