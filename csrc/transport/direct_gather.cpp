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
    if (watchdog_ && watched_) {
      watchdog_->watch(number_, call.operation, call.total_bytes(), started_ + call.timeout);
    }
    const auto began = Clock::now();
    queue_->run(program_, *waiting);
    if (courier_) hand_over(call, *waiting);
    if (may_choose(call)) {
      preference_.note(call.shard_bytes(), !through_slots(call), Clock::now() - began);
    }
    // A rank that raises gives its input away, perhaps while this one was reading it.
    if (!engine_->stream_ordered()) check_fault();
    sharing_.settle(number_, /*direct=*/true);
  });
}

// The counters are for who watches: a courier ends only once every peer's shard is here, and once
// this rank's has been read.
void DirectPull::hand_over(const Call& call, Waiter& waiting) {
  courier_->carry(call, *queue_);
  program_.assign({Step::write(page_.done(options_.rank), number_)});
  queue_->run(program_, waiting);
}

bool DirectPull::may_choose(const Call& call) const {
  return slots_.any() && !call.pieces.empty() && !slots_.hold(call.shard_bytes()) &&
         !call.overlapped && !options_.keep_slots;
}

bool DirectPull::asks_for_pull(const Call& call) {
  if (may_choose(call)) return preference_.prefers_pull(call.shard_bytes());
  return slots_.any() && call.overlapped && !slots_.hold(call.shard_bytes());
}

bool DirectPull::through_slots(const Call& call) const {
  if (!slots_.any() || slots_.hold(call.shard_bytes())) return slots_.any();
  return std::none_of(records_.begin(), records_.end(),
                      [](const CallRecord& record) { return record.pulls != 0; });
}

void DirectPull::write_program(const Call& call) {
  const int rank = options_.rank;
  const int world = options_.world;
  program_.clear();
  if (courier_) {
    program_.push_back(Step::write(page_.ready(rank), number_));
    return;  // the rest is in hand_over()
  }
  if (through_slots(call)) {
    slots_.write(call, program_);
    program_.push_back(Step::write(page_.done(rank), number_));
    return;  // peers find in the slots what they have not read yet
  }
  if (engine_->stream_ordered()) {
    program_.push_back(Step::write(page_.ready(rank), number_));
    const Wave all = std::move(cut(call, SIZE_MAX).front());
    copy_own(call, all, Step::kBeside);
    // Starting at the next rank spreads the load: no two ranks begin at the same peer.
    for (int i = 1; i < world; ++i) {
      const int peer = (rank + i) % world;
      // A track a peer: where every peer has a link of its own, all are read at the same time.
      const auto track = static_cast<uint32_t>(i);
      program_.push_back(Step::wait(page_.ready(peer), number_).on(track));
      copy_from(peer, call, all, track);
    }
    program_.push_back(Step::write(page_.done(rank), number_));
  } else {
    for (const Wave& wave : cut(call, engine_->wave_bytes())) {
      copy_own(call, wave, 0);
      for (int i = 1; i < world; ++i) copy_from((rank + i) % world, call, wave, 0);
    }
    program_.push_back(Step::write(page_.done(rank), number_));
  }
  for (int i = 1; i < world; ++i) {
    program_.push_back(Step::wait(page_.done((rank + i) % world), number_));
  }
}

void DirectPull::copy_own(const Call& call, const Wave& parts, uint32_t track) {
  for (const Part& part : parts) {
    const Piece& piece = call.pieces[part.tensor];
    auto* to = static_cast<char*>(piece.outputs[options_.rank]);
    if (to == piece.input) continue;
    const auto from = reinterpret_cast<uintptr_t>(piece.input);
    program_.push_back(Step::copy(to + part.offset, 0, from + part.offset, part.bytes).on(track));
  }
}

void DirectPull::copy_from(int peer, const Call& call, const Wave& parts, uint32_t track) {
  for (const Part& part : parts) {
    const Place& place = records_[peer].places[part.tensor];
    const Mapping from = sharing_.open(peer, place.export_id, number_);
    auto* to = static_cast<char*>(call.pieces[part.tensor].outputs[peer]);
    program_.push_back(
        Step::copy(to + part.offset, from.space, from.base + place.offset + part.offset, part.bytes)
            .on(track));
  }
}

}  // namespace pg_sdma
