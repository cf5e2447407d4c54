#include "transport/schedule/exchange.h"

namespace pg_sdma {
namespace {

char* bytes_at(const void* data) { return static_cast<char*>(const_cast<void*>(data)); }

Exchange all_gather(const Call& call, int rank, int world, bool pushes) {
  const bool writes = pushes && !call.listed;
  const size_t tensors = call.pieces.size();
  const size_t blocks = tensors * static_cast<size_t>(world);
  Exchange exchange;
  exchange.sizes.reserve(tensors);
  exchange.own.reserve(tensors);
  exchange.exposed.reserve(tensors);
  exchange.reads.reserve(blocks);
  if (writes) exchange.writes.reserve(blocks);
  for (const Piece& piece : call.pieces) {
    exchange.sizes.push_back(piece.bytes);
    exchange.own.push_back({bytes_at(piece.input), bytes_at(piece.outputs[rank])});
    const size_t all = piece.bytes * piece.outputs.size();
    exchange.exposed.push_back(writes ? Region{piece.outputs[0], all}
                                      : Region{piece.input, piece.bytes});
  }
  for (int peer = 0; peer < world; ++peer) {
    for (size_t t = 0; t < tensors; ++t) {
      const Piece& piece = call.pieces[t];
      // In a peer's output its own shard lies in its place.
      const size_t shard = writes ? static_cast<size_t>(peer) * piece.bytes : 0;
      exchange.reads.push_back({bytes_at(piece.outputs[peer]), piece.bytes, t, shard});
      if (!writes) continue;
      const size_t place = static_cast<size_t>(rank) * piece.bytes;
      exchange.writes.push_back({bytes_at(piece.input), piece.bytes, t, place});
    }
  }
  return exchange;
}

Exchange reduce_scatter(const Call& call, int rank, int world) {
  Exchange exchange;
  for (const Share& share : call.shares) {
    exchange.sizes.push_back(share.bytes);
    if (call.listed) {
      for (const void* slice : share.slices) exchange.exposed.push_back({slice, share.bytes});
    } else {
      exchange.exposed.push_back({share.slices[0], share.bytes * share.slices.size()});
    }
  }
  const auto own = static_cast<size_t>(rank);
  for (int peer = 0; peer < world; ++peer) {
    for (size_t t = 0; t < call.shares.size(); ++t) {
      const size_t bytes = call.shares[t].bytes;
      exchange.reads.push_back(call.listed ? Block{nullptr, bytes, own, 0}
                                           : Block{nullptr, bytes, t, own * bytes});
    }
  }
  return exchange;
}

}  // namespace

Exchange exchange_of(const Call& call, int rank, int world, bool pushes) {
  return call.reduces() ? reduce_scatter(call, rank, world) : all_gather(call, rank, world, pushes);
}

}  // namespace pg_sdma
