#include "transport/schedule/chunks.h"

#include <algorithm>

namespace pg_sdma {

std::vector<Parts> cut(const std::vector<size_t>& sizes, size_t most) {
  std::vector<Parts> chunks = cut_aligned(sizes, most, 1);
  if (chunks.empty()) chunks.emplace_back();
  return chunks;
}

std::vector<Parts> cut_aligned(const std::vector<size_t>& sizes, size_t room, size_t alignment) {
  std::vector<Parts> chunks;
  size_t used = room;
  for (size_t tensor = 0; tensor < sizes.size(); ++tensor) {
    for (size_t offset = 0; offset < sizes[tensor];) {
      if (used == room) {
        chunks.emplace_back();
        used = 0;
      }
      const size_t part = std::min(sizes[tensor] - offset, room - used);
      chunks.back().push_back({tensor, offset, part, used});
      offset += part;
      used += (part + alignment - 1) / alignment * alignment;
    }
  }
  return chunks;
}

}  // namespace pg_sdma
