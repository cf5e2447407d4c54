#include "transport/schedule/copies.h"

#include <utility>

namespace pg_sdma {

Program copies_on_streams(ProgramWriter& write) {
  const Exchange& exchange = write.operation().exchange;
  const Parts all = std::move(cut(exchange.sizes, SIZE_MAX).front());
  write.tell_ready();
  write.copy_own(all, Step::kBeside);
  for (int i = 1; i < write.world(); ++i) {
    const int peer = write.peer(i);
    // A track a peer: where every peer has a link of its own, all are used at the same time.
    const auto track = static_cast<uint32_t>(i);
    write.await_ready(peer, track);
    if (exchange.writes.empty()) {
      write.read(peer, all, track);
    } else {
      write.write(peer, all, track);
    }
  }
  write.tell_done();
  write.await_all_done();
  return write.take();
}

Program copies_on_thread(ProgramWriter& write, size_t chunk) {
  for (const Parts& parts : cut(write.operation().exchange.sizes, chunk)) {
    write.copy_own(parts);
    for (int i = 1; i < write.world(); ++i) write.read(write.peer(i), parts);
  }
  write.tell_done();
  write.await_all_done();
  return write.take();
}

}  // namespace pg_sdma
