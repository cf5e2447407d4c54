// The all-gather half of DirectPull: one program that copies every shard to its place.
#include <algorithm>
#include <utility>

#include "engine/inject.h"
#include "transport/direct_pull.h"

namespace pg_sdma {

void DirectPull::carry(const Call& call) {
  inject::at("carry");
  carrying_ = true;
  const std::unique_ptr<Waiter> waiting = waiter(call);
  guarded([&] {
    write_program(call);
    if (watchdog_) {
      watchdog_->watch(number_, call.operation, call.total_bytes(), started_ + call.timeout);
    }
    queue_->run(program_, *waiting);
    // A rank that raises gives its input away, perhaps while this one was reading it.
    if (!engine_->stream_ordered()) check_fault();
    sharing_.settle(number_, /*direct=*/true);
  });
}

void DirectPull::write_program(const Call& call) {
  const int rank = options_.rank;
  const int world = options_.world;
  program_.clear();
  if (engine_->stream_ordered()) {
    program_.push_back(Step::write(page_.ready(rank), number_));
    const Wave all = std::move(waves(call, SIZE_MAX).front());
    // Starting at the next rank spreads the load: no two ranks begin at the same peer.
    for (int i = 1; i < world; ++i) {
      const int peer = (rank + i) % world;
      program_.push_back(Step::wait(page_.ready(peer), number_));
      copy_from(peer, call, all);
    }
    program_.push_back(Step::write(page_.done(rank), number_));
    copy_own(call, all);
  } else {
    for (const Wave& wave : waves(call, engine_->wave_bytes())) {
      copy_own(call, wave);
      for (int i = 1; i < world; ++i) copy_from((rank + i) % world, call, wave);
    }
    program_.push_back(Step::write(page_.done(rank), number_));
  }
  for (int i = 1; i < world; ++i) {
    program_.push_back(Step::wait(page_.done((rank + i) % world), number_));
  }
}

std::vector<DirectPull::Wave> DirectPull::waves(const Call& call, size_t most) {
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

void DirectPull::copy_own(const Call& call, const Wave& parts) {
  for (const Part& part : parts) {
    const Piece& piece = call.pieces[part.tensor];
    auto* to = static_cast<char*>(piece.outputs[options_.rank]);
    if (to == piece.input) continue;
    const auto from = reinterpret_cast<uintptr_t>(piece.input);
    program_.push_back(Step::copy(to + part.offset, 0, from + part.offset, part.bytes));
  }
}

void DirectPull::copy_from(int peer, const Call& call, const Wave& parts) {
  for (const Part& part : parts) {
    const Place& place = records_[peer].places[part.tensor];
    const Mapping from = sharing_.open(peer, place.export_id, number_);
    auto* to = static_cast<char*>(call.pieces[part.tensor].outputs[peer]);
    program_.push_back(Step::copy(to + part.offset, from.space,
                                  from.base + place.offset + part.offset, part.bytes));
  }
}

}  // namespace pg_sdma
