#include "transport/schedule/late.h"

#include <utility>

namespace pg_sdma {

LatePrograms copies_in_order_of_arrival(ProgramWriter& write) {
  const std::vector<int>& earlier = *write.operation().earlier;
  const Parts all = std::move(cut(write.operation().exchange.sizes, SIZE_MAX).front());
  // Before this rank is ready, because peers read it where it comes to lie.
  write.copy_own(all);
  write.tell_ready();
  // One call of the driver for both: what follows on either track is behind it.
  if (!earlier.empty()) write.await_ready(earlier.front());
  const auto await_ready = [&](int peer, uint32_t track) {
    if (peer != earlier.front()) write.await_ready(peer, track);
  };
  for (const int peer : earlier) {
    await_ready(peer, Step::kBeside);
    write.read(peer, all, Step::kBeside);
  }
  uint32_t track = 0;
  for (const int peer : earlier) {
    await_ready(peer, ++track);
    write.write(peer, all, track);
  }
  LatePrograms programs;
  programs.copies = write.take();
  // A program of its own: what is read runs beside what is written, and `done` speaks of both.
  write.tell_done();
  write.await_all_done();
  programs.end = write.take();
  return programs;
}

}  // namespace pg_sdma
