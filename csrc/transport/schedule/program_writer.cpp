#include "transport/schedule/program_writer.h"

namespace pg_sdma {

void ProgramWriter::tell_ready() { add(Step::write(page_.ready(rank_), operation_.number)); }

void ProgramWriter::tell_done() { add(Step::write(page_.done(rank_), operation_.number)); }

void ProgramWriter::await_ready(int peer, uint32_t track) {
  add(Step::wait(page_.ready(peer), operation_.number).on(track));
}

void ProgramWriter::await_all_done() {
  for (int i = 1; i < world_; ++i) add(Step::wait(page_.done(peer(i)), operation_.number));
}

void ProgramWriter::copy_own(const Parts& parts, uint32_t track) {
  for (const Part& part : parts) {
    const Exchange::Own& own = operation_.exchange.own[part.tensor];
    if (own.to == own.from) continue;
    const auto from = reinterpret_cast<uintptr_t>(own.from) + part.offset;
    add(Step::copy(own.to + part.offset, 0, from, part.bytes).on(track));
  }
}

void ProgramWriter::read_part(int peer, const Part& part, char* to, uint32_t track) {
  const Block& block = operation_.exchange.read(peer, part.tensor);
  const RemoteRegion& region = operation_.region(peer, block.region);
  const uintptr_t from = region.address + block.offset + part.offset;
  add(Step::copy(to, region.space, from, part.bytes).on(track));
}

void ProgramWriter::read(int peer, const Parts& parts, uint32_t track) {
  for (const Part& part : parts) {
    char* to = operation_.exchange.read(peer, part.tensor).here + part.offset;
    read_part(peer, part, to, track);
  }
}

void ProgramWriter::receive(int peer, const Parts& parts, void* into) {
  for (const Part& part : parts) read_part(peer, part, static_cast<char*>(into) + part.at, 0);
}

void ProgramWriter::write(int peer, const Parts& parts, uint32_t track) {
  for (const Part& part : parts) {
    const Block& block = operation_.exchange.write(peer, part.tensor);
    const uintptr_t to = operation_.region(peer, block.region).address + block.offset + part.offset;
    const auto from = reinterpret_cast<uintptr_t>(block.here) + part.offset;
    add(Step::copy(reinterpret_cast<void*>(to), 0, from, part.bytes).on(track));
  }
}

}  // namespace pg_sdma
