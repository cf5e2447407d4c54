// The all-gather half of DirectTransport: one program that copies every shard to its place, from or
// to the peers.
#include <algorithm>
#include <utility>

#include "engine/inject.h"
#include "transport/direct_transport.h"

namespace pg_sdma {

void DirectTransport::carry(const Call& call) {
  inject::at("carry");
  carrying_ = true;
  sharing_.begin(number_);
  const std::unique_ptr<Waiter> waiting = waiter(call);
  guarded([&] {
    if (earlier_) {
      write_late_program(call);
    } else {
      write_program(call);
    }
    if (watchdog_ && watched_) {
      watchdog_->watch(number_, call.operation, call.total_bytes(), started_ + call.timeout);
    }
    const auto began = Clock::now();
    queue_->run(program_, *waiting);
    if (courier_) hand_over(call, *waiting);
    if (earlier_) tell_and_wait(*waiting);
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
void DirectTransport::hand_over(const Call& call, Waiter& waiting) {
  courier_->carry(call, *queue_);
  program_.assign({Step::write(page_.done(options_.rank), number_)});
  queue_->run(program_, waiting);
}

bool DirectTransport::may_choose(const Call& call) const {
  return slots_.any() && !call.pieces.empty() && !slots_.hold(call.shard_bytes()) &&
         !call.overlapped && !options_.keep_slots;
}

bool DirectTransport::asks_for_pull(const Call& call) {
  if (may_choose(call)) return preference_.prefers_pull(call.shard_bytes());
  return slots_.any() && call.overlapped && !slots_.hold(call.shard_bytes());
}

bool DirectTransport::always_through_slots(const Call& call) const {
  return !call.reduces() && slots_.any() && slots_.hold(call.shard_bytes());
}

bool DirectTransport::through_slots(const Call& call) const {
  if (!slots_.any() || slots_.hold(call.shard_bytes())) return slots_.any();
  return std::none_of(records_.begin(), records_.end(),
                      [](const CallRecord& record) { return record.pulls != 0; });
}

bool DirectTransport::pushes(const Call& call) const {
  return pushes() && !call.reduces() && !call.listed;
}

void DirectTransport::write_program(const Call& call) {
  const int rank = options_.rank;
  const int world = options_.world;
  program_.clear();
  if (courier_) {
    program_.push_back(Step::write(page_.ready(rank), number_));
    return;  // the rest is in hand_over()
  }
  if (through_slots(call)) {
    slots_.write(call, program_);
    add_done();
    return;  // peers find in the slots what they have not read yet
  }
  if (engine_->stream_ordered()) {
    program_.push_back(Step::write(page_.ready(rank), number_));
    const Wave all = std::move(cut(call, SIZE_MAX).front());
    copy_own(call, all, Step::kBeside);
    const bool push = pushes(call);
    // Starting at the next rank spreads the load: no two ranks begin at the same peer.
    for (int i = 1; i < world; ++i) {
      const int peer = (rank + i) % world;
      // A track a peer: where every peer has a link of its own, all are used at the same time.
      const auto track = static_cast<uint32_t>(i);
      program_.push_back(Step::wait(page_.ready(peer), number_).on(track));
      if (push) {
        copy_to(peer, call, all, track);
      } else {
        copy_from(peer, call, all, track);
      }
    }
  } else {
    for (const Wave& wave : cut(call, engine_->wave_bytes())) {
      copy_own(call, wave, 0);
      for (int i = 1; i < world; ++i) copy_from((rank + i) % world, call, wave, 0);
    }
  }
  add_done();
  add_wait_until_done();
}

void DirectTransport::add_done() {
  program_.push_back(Step::write(page_.done(options_.rank), number_));
}

void DirectTransport::add_wait_until_done() {
  for (int i = 1; i < options_.world; ++i) {
    program_.push_back(Step::wait(page_.done((options_.rank + i) % options_.world), number_));
  }
}

void DirectTransport::copy_own(const Call& call, const Wave& parts, uint32_t track) {
  for (const Part& part : parts) {
    const Piece& piece = call.pieces[part.tensor];
    auto* to = static_cast<char*>(piece.outputs[options_.rank]);
    if (to == piece.input) continue;
    const auto from = reinterpret_cast<uintptr_t>(piece.input);
    program_.push_back(Step::copy(to + part.offset, 0, from + part.offset, part.bytes).on(track));
  }
}

void DirectTransport::copy_from(int peer, const Call& call, const Wave& parts, uint32_t track) {
  const bool from_output = pushes(call);  // which is then what the peer has published
  for (const Part& part : parts) {
    const Piece& piece = call.pieces[part.tensor];
    const Place& place = records_[peer].places[part.tensor];
    const Mapping from = sharing_.open(peer, place.export_id, number_);
    const uintptr_t shard = from.base + place.offset + (from_output ? peer * piece.bytes : 0);
    auto* to = static_cast<char*>(piece.outputs[peer]) + part.offset;
    program_.push_back(Step::copy(to, from.space, shard + part.offset, part.bytes).on(track));
  }
}

void DirectTransport::copy_to(int peer, const Call& call, const Wave& parts, uint32_t track) {
  for (const Part& part : parts) {
    const Piece& piece = call.pieces[part.tensor];
    const Place& place = records_[peer].places[part.tensor];
    const Mapping to = sharing_.open(peer, place.export_id, number_);
    const uintptr_t at = to.base + place.offset + options_.rank * piece.bytes + part.offset;
    const auto from = reinterpret_cast<uintptr_t>(piece.input) + part.offset;
    program_.push_back(Step::copy(reinterpret_cast<void*>(at), 0, from, part.bytes).on(track));
  }
}

}  // namespace pg_sdma
