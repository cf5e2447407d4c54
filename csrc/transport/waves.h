// Calls cut into waves: what a rank copies of every shard before it goes on to the next bytes.
#pragma once

#include <cstddef>
#include <vector>

#include "transport/transport.h"

namespace pg_sdma {

// Bytes [offset, offset + bytes) of every rank's shard of one tensor.
struct Part {
  size_t tensor = 0;
  size_t offset = 0;
  size_t bytes = 0;
};
using Wave = std::vector<Part>;

// An all-gather's shards in order, at most `most` bytes a wave. At least one wave, maybe empty.
std::vector<Wave> cut(const Call& call, size_t most);

}  // namespace pg_sdma
