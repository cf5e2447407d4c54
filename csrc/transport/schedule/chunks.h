// Blocks cut into chunks: what a rank copies of every block before it goes on to the next bytes.
#pragma once

#include <cstddef>
#include <vector>

namespace pg_sdma {

// Bytes [offset, offset + bytes) of every rank's block of one tensor.
struct Part {
  size_t tensor = 0;
  size_t offset = 0;
  size_t bytes = 0;
  size_t at = 0;  // where in a receive buffer, whose parts are aligned
};
using Parts = std::vector<Part>;

// Blocks of `sizes` bytes in order, at most `most` bytes a chunk. At least one chunk, maybe empty.
std::vector<Parts> cut(const std::vector<size_t>& sizes, size_t most);
// The same for receive buffers of `room` bytes, a multiple of `alignment`, as every part's place
// and every cut is. None where there are no bytes.
std::vector<Parts> cut_aligned(const std::vector<size_t>& sizes, size_t room, size_t alignment);

}  // namespace pg_sdma
