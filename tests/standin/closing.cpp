// When a rank closes what its peer has freed, on the stand-in, one case a run.
//
//   closing <driver> <folder> <case>
//
//   waits    not while a stream waits for a peer: a driver may hold up the host until it goes on
//   makes    where a stream always waits, an operation makes a moment in which none does
//   again    what cannot be opened once is tried again, and the call goes direct
//   fails    the thread that looks for freed memory goes on after a call of the driver that failed
//            (STANDIN_FAIL)
#include <atomic>
#include <cstring>
#include <thread>

#include "engine/inject.h"
#include "group.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr std::chrono::milliseconds kTimeout{60000};
constexpr size_t kShard = 1000;
constexpr std::chrono::milliseconds kLongerThanALook{300};

class Gather {
 public:
  explicit Gather(int rank) : rank_(rank), output_(2 * kShard) {}

  void enqueue(DirectTransport& transport) {
    std::memset(output_.data(), 0xA5, output_.bytes());
    std::memset(output_.data() + rank_ * kShard, rank_ + 1, kShard);
    enqueue_again(transport);
  }
  // While the device may still be at the one before.
  void enqueue_again(DirectTransport& transport) {
    const Call call = gather_in_place(output_.data(), kShard, rank_, 2, kTimeout);
    const Operation operation = transport.agree(call);
    REQUIRE(operation.decision.direct);
    transport.queue().follow_caller();
    transport.run(call, operation);
    transport.queue().caller_follows();
  }
  void check() {
    REQUIRE(cuStreamSynchronize(caller) == 0);
    for (size_t at = 0; at < output_.bytes(); ++at) {
      REQUIRE(output_.data()[at] == at / kShard + 1);
    }
  }

 private:
  const int rank_;
  Buffer output_;
};

bool all_closed() { return standin_mapped() <= 2 * kShard; }  // but the output that stays

// Rank 0 frees one of two outputs; the stream of rank 1 waits for rank 0's meanwhile. Rank 1 may
// have closed it before it waits: such a round shows nothing.
void waits(int rank, DirectTransport& transport, Engine& engine) {
  Gather stays(rank);
  stays.enqueue(transport);
  stays.check();
  int shown = 0;
  for (int round = 0; round < 5; ++round) {
    auto freed = std::make_unique<Gather>(rank);
    freed->enqueue(transport);
    freed->check();
    Gate gate(engine);
    if (rank == 0) {
      freed.reset();  // before anything waits, as freeing waits for that
      gate.close();
    }
    stays.enqueue(transport);
    const bool open = rank == 1 && !all_closed();
    std::this_thread::sleep_for(kLongerThanALook);
    if (open) {
      REQUIRE(!all_closed());
      ++shown;
    }
    std::this_thread::sleep_for(kLongerThanALook);  // rank 1 has looked by then
    gate.open();
    stays.check();
    if (rank == 1) REQUIRE(soon(all_closed));
  }
  REQUIRE(rank == 0 || shown > 0);
}

// Each operation ends once the next has been enqueued, or after a while.
void makes(int rank, DirectTransport& transport, Engine& engine) {
  Gather stays(rank);
  stays.enqueue(transport);
  stays.check();
  auto freed = std::make_unique<Gather>(rank);
  freed->enqueue(transport);
  freed->check();
  if (rank == 0) freed.reset();
  Gate gate(engine);
  std::atomic<uint64_t> enqueued = 0;
  std::atomic<bool> over = false;
  std::thread releases([&] {
    for (uint64_t next = 1; !over; ++next) {
      while (enqueued < next && !over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      for (int i = 0; i < 40 && enqueued == next && !over; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      gate.open(next);
    }
  });
  constexpr uint64_t kCalls = 300;  // of 10 ms, and more
  for (uint64_t number = 1; number <= kCalls; ++number) {
    gate.close();
    stays.enqueue_again(transport);
    enqueued = number;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (rank == 1) REQUIRE(all_closed());
  over = true;
  releases.join();
  gate.open();
  stays.check();
  stays.enqueue(transport);
  stays.check();
}

void again(int rank, DirectTransport& transport) {
  Gather gather(rank);
  if (rank == 1) inject::configure("import=refuse#1");
  gather.enqueue(transport);
  gather.check();
}

void fails(int rank, DirectTransport& transport) {
  Gather stays(rank);
  auto freed = std::make_unique<Gather>(rank);
  freed->enqueue(transport);
  freed->check();
  stays.enqueue(transport);
  stays.check();
  // Nobody else asks meanwhile.
  if (rank == 0) REQUIRE(soon([] { return standin_calls("cuPointerGetAttributes") > 200; }));
  if (rank == 0) freed.reset();
  REQUIRE(rank == 0 || soon(all_closed));
  stays.enqueue(transport);
  stays.check();
}

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 4);
  const std::string which = argv[3];
  return run_ranks(2, [&](int rank) {
    auto transport = join(argv[1], argv[2], rank, 2, std::chrono::minutes(1));
    {
      const auto engine = engine_by(argv[1], rank);
      if (which == "waits") {
        waits(rank, *transport, *engine);
      } else if (which == "makes") {
        makes(rank, *transport, *engine);
      } else if (which == "again") {
        again(rank, *transport);
      } else {
        REQUIRE(which == "fails");
        fails(rank, *transport);
      }
    }
    transport.reset();
  });
}
