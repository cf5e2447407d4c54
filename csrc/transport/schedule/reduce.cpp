#include "transport/schedule/reduce.h"

namespace pg_sdma {

Program sums(ProgramWriter& write, const Call& call, Reducer& reducer, bool on_streams,
             std::list<Launch>& launches) {
  const std::vector<Parts> chunks =
      cut_aligned(write.operation().exchange.sizes, reducer.room(), kMostElement);
  if (on_streams) write.tell_ready();
  const auto buffers = static_cast<size_t>(reducer.landings());
  for (size_t n = 0; n < chunks.size(); ++n) {
    const auto which = static_cast<int>(n % buffers);
    // What landed here before has to be summed first.
    if (n >= buffers) write.add(Step::join(n % buffers));
    for (int i = 1; i < write.world(); ++i) {
      const int peer = write.peer(i);
      if (n == 0 && on_streams) write.await_ready(peer);
      write.receive(peer, chunks[n], reducer.landing(which, peer));
    }
    write.add(Step::fork());
    // The peers need not wait for this rank's last sum: their slices have been read.
    if (n + 1 == chunks.size()) write.tell_done();
    for (const Part& part : chunks[n]) {
      const Share& share = call.shares[part.tensor];
      launches.push_back(reducer.launch(share, part.offset, part.bytes, which, part.at));
      write.add(Step::start(launches.back()));
    }
    write.add(Step::mark(n % buffers));
  }
  if (chunks.empty()) write.tell_done();
  write.await_all_done();
  if (!chunks.empty()) write.add(Step::join((chunks.size() - 1) % buffers));
  return write.take();
}

}  // namespace pg_sdma
