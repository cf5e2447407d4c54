#include "transport/call.h"

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

}  // namespace pg_sdma
