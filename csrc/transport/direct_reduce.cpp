// The reduce-scatter half of DirectTransport: slices land piece by piece and are summed as they
// come, on the calling thread or, where the engine is stream-ordered, by kernels beside the next
// copies.
#include <algorithm>
#include <stdexcept>

#include "engine/inject.h"
#include "transport/direct_transport.h"

namespace pg_sdma {

void DirectTransport::reduce(const Call& call, Reducer& reducer) {
  if (engine_->stream_ordered()) {
    throw std::logic_error("reduce-scatters are for engines that run programs on the caller");
  }
  const int rank = options_.rank;
  const int world = options_.world;
  inject::at("carry");
  carrying_ = true;
  const std::unique_ptr<Waiter> waiting = waiter(call);
  std::vector<const void*> slices(world);
  guarded([&] {
    for (const std::vector<Landing>& parts : landings(call, reducer.room())) {
      program_.clear();
      for (int i = 1; i < world; ++i) {
        const int peer = (rank + i) % world;
        land_from(peer, call, parts, reducer.landing(peer));
      }
      queue_->run(program_, *waiting);
      for (const Landing& part : parts) {
        const Share& share = call.shares[part.share];
        for (int r = 0; r < world; ++r) {
          slices[r] = r == rank ? static_cast<const char*>(share.slices[rank]) + part.offset
                                : static_cast<const char*>(reducer.landing(r)) + part.at;
        }
        reducer.reduce(share, part.offset, part.bytes, slices);
      }
    }
    program_.clear();
    add_done();
    add_wait_until_done();
    queue_->run(program_, *waiting);
    check_fault();
    sharing_.settle(number_, /*direct=*/true);
  });
}

void DirectTransport::reduce(const Call& call, StreamReducer& reducer) {
  inject::at("carry");
  carrying_ = true;
  sharing_.begin(number_);
  const std::unique_ptr<Waiter> waiting = waiter(call);
  guarded([&] {
    write_program(call, reducer);
    if (watchdog_) {
      watchdog_->watch(number_, call.operation, call.total_bytes(), started_ + call.timeout,
                       "input");
    }
    queue_->run(program_, *waiting);
    sharing_.settle(number_, /*direct=*/true);
  });
}

void DirectTransport::write_program(const Call& call, StreamReducer& reducer) {
  const int rank = options_.rank;
  const int world = options_.world;
  const std::vector<std::vector<Landing>> pieces = landings(call, reducer.room());
  program_.clear();
  launches_.clear();
  program_.push_back(Step::write(page_.ready(rank), number_));
  const auto ways = static_cast<size_t>(reducer.landings());
  for (size_t n = 0; n < pieces.size(); ++n) {
    const int which = static_cast<int>(n % ways);
    // What landed here before has to be summed first.
    if (n >= ways) program_.push_back(Step::join(which));
    for (int i = 1; i < world; ++i) {
      const int peer = (rank + i) % world;
      if (n == 0) program_.push_back(Step::wait(page_.ready(peer), number_));
      land_from(peer, call, pieces[n], reducer.landing(which, peer));
    }
    program_.push_back(Step::fork());
    // The peers need not wait for this rank's last sum: their slices have been read.
    if (n + 1 == pieces.size()) add_done();
    for (const Landing& part : pieces[n]) {
      const Share& share = call.shares[part.share];
      launches_.push_back(reducer.launch(share, part.offset, part.bytes, which, part.at));
      program_.push_back(Step::start(launches_.back()));
    }
    program_.push_back(Step::mark(which));
  }
  if (pieces.empty()) add_done();
  add_wait_until_done();
  if (!pieces.empty()) {
    program_.push_back(Step::join((pieces.size() - 1) % ways));
  }
}

std::vector<std::vector<DirectTransport::Landing>> DirectTransport::landings(const Call& call,
                                                                             size_t room) {
  const auto aligned = [](size_t bytes) {
    return (bytes + kMostElement - 1) / kMostElement * kMostElement;
  };
  std::vector<std::vector<Landing>> landings;
  size_t used = room;
  for (size_t share = 0; share < call.shares.size(); ++share) {
    const size_t bytes = call.shares[share].bytes;
    for (size_t offset = 0; offset < bytes;) {
      if (used == room) {
        landings.emplace_back();
        used = 0;
      }
      // What is cut off is a multiple of kMostElement: no element is torn.
      const size_t part = std::min(bytes - offset, room - used);
      landings.back().push_back({share, offset, part, used});
      offset += part;
      used += aligned(part);
    }
  }
  return landings;
}

void DirectTransport::land_from(int peer, const Call& call, const std::vector<Landing>& parts,
                                void* to) {
  const auto rank = static_cast<size_t>(options_.rank);
  for (const Landing& part : parts) {
    const size_t region = call.listed ? rank : part.share;
    const size_t first = call.listed ? 0 : rank * call.shares[part.share].bytes;
    const Place& place = records_[peer].places[region];
    const Mapping from = sharing_.open(peer, place.export_id, number_);
    program_.push_back(Step::copy(static_cast<char*>(to) + part.at, from.space,
                                  from.base + place.offset + first + part.offset, part.bytes));
  }
}

}  // namespace pg_sdma
