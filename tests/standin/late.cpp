// All-gathers for which a rank is late, on the stand-in, one case a run.
//
//   late <driver> <folder> <case>
//
//   run-ahead    rank 0 makes more calls than are deferred before rank 1 makes its first: its host
//                waits for the first few, for none of the others, and the last go to the inner
//   unreachable  three ranks, of which the second to come cannot share its output
//   first        two ranks, of which the first to come cannot: the inner's, so that no host waits
//   strangers    three ranks, of which the second and the third to come cannot
//   import       rank 1 comes late, and cannot open what rank 0 shares
//   retry        the same, but only the first time
//   held         another part of the segment is unmapped while rank 1 has yet to copy into it
//   leave        rank 0 leaves the group, and ends, while rank 1 has yet to come
//   tickets      a call into outputs of which one's ticket could take another's place
//   unmapped     another part of the segment of rank 0's output is unmapped before rank 1 comes
//   parts        the same, of a segment that rank 1 has not opened before
//   empty        rank 1 comes late for a call of no bytes: freed memory is not held till then
//   places       a call that shares more of a rank than its record has places for: the inner's
//   mismatch     rank 1 comes late, with another size
//   invalid      rank 1 comes late, with bad arguments
//   other-kind   rank 1 comes late, with a call that is not deferred
// The last three, import and strangers end the group: the late raise, and the watchdog ends rank 0.
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "engine/inject.h"
#include "group.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr std::chrono::milliseconds kTimeout{60000};
constexpr std::chrono::milliseconds kLate{400};
constexpr std::chrono::milliseconds kLongerThanADrain{2500};        // of what a group leaves behind
constexpr std::chrono::milliseconds kLongerThanATicketLasts{1000};  // once its memory is gone
constexpr size_t kShard = 1000;
constexpr size_t kChunk = 1 << 16;
constexpr int kRoom = 128;  // calls that may wait for a late rank
constexpr int kTickets = 2 * kMaxTensors;

unsigned char content(int rank, int number, size_t at) {
  return static_cast<unsigned char>(1 + 31 * rank + 7 * number + at);
}

// One gather's output, poisoned, with the own shard in place or apart from it.
class Gather {
 public:
  Gather(int rank, int world, int number, bool in_place)
      : Gather(rank, world, number, in_place, std::make_shared<Buffer>((world + 1) * kShard), 0) {}
  // In a buffer that it shares with others, as the `nth` of them.
  Gather(int rank, int world, int number, bool in_place, std::shared_ptr<Buffer> buffer, size_t nth)
      : number_(number),
        buffer_(std::move(buffer)),
        output_(buffer_->data() + nth * (world + 1) * kShard),
        bytes_(world * kShard) {
    call.operation = "gather";
    call.dtype = "uint8";
    call.timeout = kTimeout;
    fill(rank, world, in_place);
  }

  void fill(int rank, int world, bool in_place) {
    call.pieces.clear();
    std::memset(output_, 0xA5, bytes_);
    auto* own = output_ + (in_place ? rank * kShard : bytes_);
    for (size_t i = 0; i < kShard; ++i) own[i] = content(rank, number_, i);
    call.pieces.push_back({own, kShard, {}});
    for (int r = 0; r < world; ++r) {
      call.pieces[0].outputs.push_back(output_ + r * kShard);
    }
  }

  void check() const {
    for (size_t at = 0; at < bytes_; ++at) {
      REQUIRE(output_[at] == content(static_cast<int>(at / kShard), number_, at % kShard));
    }
  }

  Call call;

 private:
  const int number_;
  const std::shared_ptr<Buffer> buffer_;
  unsigned char* const output_;
  const size_t bytes_;
};

enum class Went { kInner, kDirect, kInOrderOfArrival };

Went carry(DirectTransport& transport, const Call& call) {
  const Operation operation = transport.agree(call);
  if (!operation.decision.direct) return Went::kInner;
  transport.queue().follow_caller();
  transport.run(call, operation);
  transport.queue().caller_follows();
  return operation.in_order_of_arrival() ? Went::kInOrderOfArrival : Went::kDirect;
}

// Says what `body` raises, and ends this process.
void raises(int rank, const std::function<void()>& body) {
  try {
    body();
  } catch (const GroupFault& fault) {
    std::fprintf(stderr, "rank %d raised: %s\n", rank, fault.what());
    std::_Exit(0);
  }
  REQUIRE(!"nothing was raised");
}

void run_ahead(int rank, DirectTransport& transport) {
  const auto buffer = std::make_shared<Buffer>((kRoom + 4) * 3 * kShard);
  std::deque<Gather> gathers;
  for (int i = 0; i < kRoom + 4; ++i) gathers.emplace_back(rank, 2, i, i % 2 == rank, buffer, i);
  if (rank == 1) std::this_thread::sleep_for(kLate);
  const auto began = Clock::now();
  for (int i = 0; i < kRoom + 4; ++i) {
    REQUIRE(carry(transport, gathers[i].call) ==
            (i < kRoom ? Went::kInOrderOfArrival : Went::kInner));
  }
  if (rank == 0) REQUIRE(Clock::now() - began < kLate);
  REQUIRE(cuStreamSynchronize(caller) == 0);
  for (int i = 0; i < kRoom; ++i) gathers[i].check();
  // Once all have caught up there is room again.
  Gather another(rank, 2, kRoom + 4, true);
  if (rank == 1) std::this_thread::sleep_for(kLate);
  REQUIRE(carry(transport, another.call) == Went::kInOrderOfArrival);
  REQUIRE(cuStreamSynchronize(caller) == 0);
  another.check();
}

void unreachable(int rank, DirectTransport& transport) {
  std::this_thread::sleep_for(rank * kLate);
  Gather gather(rank, 3, 0, false);
  if (rank == 1) gather.call.unable = "made so on purpose";
  REQUIRE(carry(transport, gather.call) == Went::kInOrderOfArrival);
  REQUIRE(cuStreamSynchronize(caller) == 0);
  gather.check();
}

void first(int rank, DirectTransport& transport) {
  std::this_thread::sleep_for(rank * kLate);
  Gather gather(rank, 2, 0, false);
  if (rank == 0) gather.call.unable = "made so on purpose";
  REQUIRE(carry(transport, gather.call) == Went::kInner);
}

void strangers(int rank, DirectTransport& transport) {
  std::this_thread::sleep_for(rank * kLate);
  Gather gather(rank, 3, 0, false);
  gather.call.timeout = kLongerThanADrain;
  if (rank > 0) gather.call.unable = "made so on purpose";
  raises(rank, [&] {
    REQUIRE(carry(transport, gather.call) != Went::kInner);
    REQUIRE(cuStreamSynchronize(caller) == 0);  // until the watchdog ends this process
  });
}

// As Lane::shutdown() does it, while the output is still there.
void leave(int rank, std::unique_ptr<DirectTransport>& transport) {
  Gather gather(rank, 2, 0, true);
  if (rank == 1) std::this_thread::sleep_for(kLongerThanADrain);
  REQUIRE(carry(*transport, gather.call) == Went::kInOrderOfArrival);
  transport->drain();
  transport.reset();
  REQUIRE(cuStreamSynchronize(caller) == 0);
  gather.check();
}

// As many outputs at a time as one call carries, once all have tickets a call into two of which the
// second, whose ticket was replaced, is at home where the first's lies now.
void tickets(int rank, DirectTransport& transport) {
  std::deque<Gather> gathers;
  const auto call_of = [&](std::initializer_list<std::pair<int, int>> ranges) {
    Call call = gathers[0].call;
    call.pieces.clear();
    for (const auto& [first, last] : ranges) {
      for (int i = first; i < last; ++i) {
        gathers[i].fill(rank, 2, true);
        call.pieces.push_back(gathers[i].call.pieces[0]);
      }
    }
    return call;
  };
  constexpr int kHome = kTickets;
  for (int i = 0; i <= kHome; ++i) gathers.emplace_back(rank, 2, i, true);
  for (int first = 0; first <= kHome; first += kMaxTensors) {
    REQUIRE(carry(transport, call_of({{first, std::min(first + kMaxTensors, kHome + 1)}})) !=
            Went::kInner);
    REQUIRE(cuStreamSynchronize(caller) == 0);
  }
  if (rank == 1) std::this_thread::sleep_for(kLate);
  REQUIRE(carry(transport, call_of({{kHome, kHome + 1}, {0, 1}})) == Went::kInOrderOfArrival);
  REQUIRE(cuStreamSynchronize(caller) == 0);
  gathers[kHome].check();
  gathers[0].check();
}

void unmapped(int rank, DirectTransport& transport) {
  Buffer segment(3 * kChunk, kChunk, rank);
  const auto call_of = [&](size_t shard) {
    std::memset(segment.data(), 0xA5, 2 * shard);
    std::memset(segment.data() + rank * shard, rank + 1, shard);
    return gather_in_place(segment.data(), shard, rank, 2, kTimeout);
  };
  Went went;
  do {  // until both ranks have opened the whole segment of the other
    went = carry(transport, call_of(3 * kChunk / 2));
    REQUIRE(went != Went::kInner);
    REQUIRE(cuStreamSynchronize(caller) == 0);
  } while (went == Went::kInOrderOfArrival);
  const Call call = call_of(kShard);
  if (rank == 1) std::this_thread::sleep_for(kLongerThanATicketLasts);
  REQUIRE(carry(transport, call) == Went::kInOrderOfArrival);
  if (rank == 0) segment.unmap_chunk(2);
  REQUIRE(cuStreamSynchronize(caller) == 0);
  for (size_t at = 0; at < 2 * kShard; ++at) REQUIRE(segment.data()[at] == at / kShard + 1);
  if (rank == 0) segment.map_chunk(2, rank);
}

void parts(int rank, DirectTransport& transport) {
  Buffer segment(3 * kChunk, kChunk, rank);
  const auto gather = [&](size_t shard, int late, const std::function<void()>& meanwhile) {
    std::memset(segment.data(), 0xA5, 2 * shard);
    std::memset(segment.data() + rank * shard, rank + 1, shard);
    if (rank == late) std::this_thread::sleep_for(kLongerThanATicketLasts);
    REQUIRE(carry(transport, gather_in_place(segment.data(), shard, rank, 2, kTimeout)) ==
            Went::kInOrderOfArrival);
    if (rank != late) meanwhile();
    REQUIRE(cuStreamSynchronize(caller) == 0);
    for (size_t at = 0; at < 2 * shard; ++at) REQUIRE(segment.data()[at] == at / shard + 1);
  };
  gather(3 * kChunk / 2, /*late=*/0, [] {});
  gather(kShard, /*late=*/1, [&] { segment.unmap_chunk(2); });
  if (rank == 0) segment.map_chunk(2, rank);
}

void retry(int rank, DirectTransport& transport) {
  Gather gather(rank, 2, 0, true);
  if (rank == 1) {
    std::this_thread::sleep_for(kLate);
    inject::configure("import=refuse#1");
  }
  REQUIRE(carry(transport, gather.call) == Went::kInOrderOfArrival);
  REQUIRE(cuStreamSynchronize(caller) == 0);
  gather.check();
}

// Not deferred: the stream of rank 1 holds work that has yet to run.
void held(int rank, DirectTransport& transport, Engine& engine) {
  transport.set_wait_policy(WaitPolicy::fixed(kTimeout));
  Buffer segment(3 * kChunk, kChunk, rank);
  const auto call_of = [&](size_t shard) {
    std::memset(segment.data(), 0xA5, 2 * shard);
    std::memset(segment.data() + rank * shard, rank + 1, shard);
    return gather_in_place(segment.data(), shard, rank, 2, kTimeout);
  };
  REQUIRE(carry(transport, call_of(3 * kChunk / 2)) != Went::kInner);
  REQUIRE(cuStreamSynchronize(caller) == 0);
  Gate gate(engine);
  if (rank == 1) gate.close();
  REQUIRE(carry(transport, call_of(kShard)) == Went::kDirect);
  if (rank == 0) segment.unmap_chunk(2);
  std::this_thread::sleep_for(kLongerThanATicketLasts);
  gate.open();
  REQUIRE(cuStreamSynchronize(caller) == 0);
  for (size_t at = 0; at < 2 * kShard; ++at) REQUIRE(segment.data()[at] == at / kShard + 1);
  if (rank == 0) segment.map_chunk(2, rank);
}

void empty(int rank, DirectTransport& transport) {
  auto gather = std::make_unique<Gather>(rank, 2, 0, true);
  Went went;
  do {  // until both ranks have opened the other's output
    went = carry(transport, gather->call);
    REQUIRE(went != Went::kInner);
    REQUIRE(cuStreamSynchronize(caller) == 0);
  } while (went == Went::kInOrderOfArrival);
  Call call = gather->call;
  call.pieces[0].bytes = 0;
  gather.reset();
  if (rank == 1) {
    std::this_thread::sleep_for(kLate);
    REQUIRE(soon([] { return standin_mapped() == 0; }));
  }
  REQUIRE(carry(transport, call) == Went::kInOrderOfArrival);
  REQUIRE(cuStreamSynchronize(caller) == 0);
}

// A reduce-scatter of a list: each slice is a place of its own.
void places(int rank, DirectTransport& transport) {
  constexpr size_t kSlice = 16;
  Buffer input((kMaxTensors + 1) * kSlice);
  Call call = gather_in_place(input.data(), kSlice, rank, 2, kTimeout);
  call.pieces.clear();
  call.reduction = "sum";
  call.listed = true;
  Share share{0, {}, kSlice, input.data()};
  for (int i = 0; i <= kMaxTensors; ++i) share.slices.push_back(input.data() + i * kSlice);
  call.shares.push_back(share);
  Decision decision;
  do {
    decision = transport.agree(call).decision;
  } while (decision.reason == "late");
  REQUIRE(!decision.direct);
  REQUIRE(decision.here == "more tensors of a rank than one operation carries");
}

void misfit(int rank, DirectTransport& transport, const std::string& which) {
  Gather gather(rank, 2, 0, true);
  if (rank == 0) {
    REQUIRE(carry(transport, gather.call) != Went::kInner);
    REQUIRE(cuStreamSynchronize(caller) == 0);  // until the watchdog ends this process
    return;
  }
  std::this_thread::sleep_for(kLate);
  if (which == "invalid") {
    gather.call.invalid = "rank 1: made badly on purpose";
  } else if (which == "other-kind") {
    gather.call.operation = "list";
    gather.call.listed = true;
  } else if (which == "import") {
    inject::configure("import=refuse");
  } else {
    REQUIRE(which == "mismatch");
    gather.call.pieces[0].bytes /= 2;
  }
  raises(1, [&] { carry(transport, gather.call); });
}

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 4);
  const std::string which = argv[3];
  const int world = which == "unreachable" || which == "strangers" ? 3 : 2;
  return run_ranks(world, [&](int rank) {
    const bool defer = which != "held";
    auto transport = join(argv[1], argv[2], rank, world, {}, /*queues=*/0, defer, kTickets);
    if (which == "run-ahead") {
      run_ahead(rank, *transport);
    } else if (which == "unreachable") {
      unreachable(rank, *transport);
    } else if (which == "first") {
      first(rank, *transport);
    } else if (which == "strangers") {
      strangers(rank, *transport);
    } else if (which == "parts") {
      parts(rank, *transport);
    } else if (which == "retry") {
      retry(rank, *transport);
    } else if (which == "held") {
      held(rank, *transport, *engine_by(argv[1], rank));
    } else if (which == "leave") {
      leave(rank, transport);
    } else if (which == "tickets") {
      tickets(rank, *transport);
    } else if (which == "unmapped") {
      unmapped(rank, *transport);
    } else if (which == "places") {
      places(rank, *transport);
    } else if (which == "empty") {
      empty(rank, *transport);
    } else {
      misfit(rank, *transport, which);
    }
    transport.reset();
  });
}
