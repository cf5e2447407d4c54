#include "transport/schedule/staged.h"

#include <algorithm>

namespace pg_sdma {
namespace {

// Of shared memory that a group may have, with its control page. Between two fills of a buffer a
// rank reads or writes about all of it: twice what a core's own cache holds, so that the buffer has
// left the readers' caches, from where taking it back would be slower (docs/experiments.md).
constexpr size_t kMostShared = size_t{2} << 20;

// A chunk costs each rank a handshake with every peer.
constexpr size_t kLeastBuffer = size_t{16} << 10;

constexpr size_t kCount = 16;

constexpr size_t kAlignment = 64;  // a cache line

}  // namespace

SlotShape StagingBuffers::shape(int world, size_t page_bytes) {
  if (world < 2 || page_bytes >= kMostShared) return {};
  const size_t buffers = static_cast<size_t>(world) * kCount;
  const size_t bytes = (kMostShared - page_bytes) / buffers / kAlignment * kAlignment;
  if (bytes < kLeastBuffer) return {};
  return {kCount, bytes};
}

bool StagingBuffers::hold(size_t shard) const { return shard <= lead_ * page_.slots().bytes; }

Program StagingBuffers::copies(ProgramWriter& write) {
  const std::vector<Chunk> chunks = cut(write.operation().exchange.sizes, page_.slots().bytes);
  size_t filled = 0;
  for (size_t emptied = 0; emptied < chunks.size(); ++emptied) {
    for (; filled < std::min(chunks.size(), emptied + lead_); ++filled) {
      fill(chunks[filled], number_ + filled + 1, write);
    }
    empty(chunks[emptied], number_ + emptied + 1, write);
  }
  number_ += chunks.size();
  write.tell_done();  // peers find in the buffers what they have not read yet
  return write.take();
}

void StagingBuffers::fill(const Chunk& chunk, uint64_t number, ProgramWriter& write) {
  char* const to = buffer(rank_, number);
  for (const Part& part : chunk) {
    const char* from = write.operation().exchange.own[part.tensor].from + part.offset;
    write.add(Step::copy(to + part.at, 0, reinterpret_cast<uintptr_t>(from), part.bytes));
  }
  write.add(Step::write(page_.filled(rank_), number));
  write.copy_own(chunk);  // now that its peers can go on
}

void StagingBuffers::empty(const Chunk& chunk, uint64_t number, ProgramWriter& write) {
  for (int i = 1; i < world_; ++i) {
    const int peer = write.peer(i);
    write.add(Step::wait(page_.filled(peer), number));
    const char* const from = buffer(peer, number);
    for (const Part& part : chunk) {
      char* to = write.operation().exchange.read(peer, part.tensor).here + part.offset;
      write.add(Step::copy(to, 0, reinterpret_cast<uintptr_t>(from + part.at), part.bytes));
    }
  }
}

char* StagingBuffers::buffer(int rank, uint64_t number) const {
  return page_.slot(rank, number % page_.slots().count);
}

}  // namespace pg_sdma
