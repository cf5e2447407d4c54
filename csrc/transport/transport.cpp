#include "transport/transport.h"

namespace pg_sdma {

std::vector<uint64_t> Call::shards() const {
  if (!whole.empty()) return whole;
  std::vector<uint64_t> bytes;
  for (const Piece& piece : pieces) bytes.push_back(piece.bytes);
  for (const Share& share : shares) bytes.push_back(share.bytes);
  return bytes;
}

uint64_t Call::shard_bytes() const {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

uint64_t Call::total_bytes() const {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes * piece.outputs.size();
  for (const Share& share : shares) bytes += share.bytes * share.slices.size();
  return bytes;
}

std::vector<Region> Call::regions() const {
  std::vector<Region> regions;
  for (const Piece& piece : pieces) regions.push_back({piece.input, piece.bytes});
  for (const Share& share : shares) {
    if (listed) {
      for (const void* slice : share.slices) regions.push_back({slice, share.bytes});
    } else {
      regions.push_back({share.slices[0], share.bytes * share.slices.size()});
    }
  }
  return regions;
}

std::vector<Region> Call::targets() const {
  std::vector<Region> targets;
  for (const Piece& piece : pieces) {
    targets.push_back({piece.outputs[0], piece.bytes * piece.outputs.size()});
  }
  return targets;
}

}  // namespace pg_sdma
