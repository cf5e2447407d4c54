#include "transport/waves.h"

#include <algorithm>

namespace pg_sdma {

std::vector<Wave> cut(const Call& call, size_t most) {
  std::vector<Wave> waves(1);
  size_t room = most;
  for (size_t tensor = 0; tensor < call.pieces.size(); ++tensor) {
    const size_t bytes = call.pieces[tensor].bytes;
    for (size_t offset = 0; offset < bytes;) {
      if (room == 0) {
        waves.emplace_back();
        room = most;
      }
      const size_t part = std::min(bytes - offset, room);
      waves.back().push_back({tensor, offset, part});
      offset += part;
      room -= part;
    }
  }
  return waves;
}

}  // namespace pg_sdma
