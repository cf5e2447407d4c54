// Gathers into many outputs, each an allocation of its own, one after the other: all direct, every
// byte checked, nothing left open, and few questions to the driver.
//
//   outputs <driver> <folder> <ranks> <outputs> <tickets>
//
// <folder> is empty and the group's own. With as many tickets as outputs, or more, nothing is
// opened twice.
#include <cstring>
#include <deque>

#include "group.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr size_t kShard = 500;
constexpr long kMostQuestions = 6;

// By this thread: another one looks for freed memory meanwhile.
long questions() { return standin_calls_here("cuPointerGetAttributes"); }
long opens() { return standin_calls("cuIpcOpenMemHandle_v2"); }

unsigned char content(int rank, int output, int round) {
  return static_cast<unsigned char>(1 + 5 * rank + 3 * output + 101 * round);
}

class Outputs {
 public:
  Outputs(int rank, int world, int count, DirectTransport& transport)
      : rank_(rank), world_(world), transport_(transport) {
    for (int i = 0; i < count; ++i) outputs_.emplace_back(kShard * world);
  }

  // Into all outputs, as many at a time as one call carries.
  void round(int number) {
    const int count = static_cast<int>(outputs_.size());
    for (int first = 0; first < count; first += kMaxTensors) {
      const int last = std::min(count, first + kMaxTensors);
      std::deque<Buffer> inputs;
      Call call;
      call.operation = "outputs";
      call.dtype = "uint8";
      call.timeout = std::chrono::minutes(1);
      for (int i = first; i < last; ++i) {
        std::memset(outputs_[i].data(), 0xA5, outputs_[i].bytes());
        Buffer& input = inputs.emplace_back(kShard);
        std::memset(input.data(), content(rank_, i, number), kShard);
        Piece piece{input.data(), kShard, {}};
        for (int r = 0; r < world_; ++r) piece.outputs.push_back(outputs_[i].data() + r * kShard);
        call.pieces.push_back(std::move(piece));
      }
      const long before = questions();
      const Operation operation = transport_.agree(call);
      REQUIRE(operation.decision.direct);
      // A few about each output of the call, whatever the number of those that are live.
      const long asked = questions() - before;
      if (asked > kMostQuestions * (last - first)) std::fprintf(stderr, "%ld questions\n", asked);
      REQUIRE(asked <= kMostQuestions * (last - first));
      transport_.queue().use_callers_stream();
      transport_.run(call, operation);
      REQUIRE(cuStreamSynchronize(caller) == 0);
      for (int i = first; i < last; ++i) look(i, number);
    }
  }

 private:
  void look(int output, int number) const {
    for (int r = 0; r < world_; ++r) {
      const unsigned char* shard = outputs_[output].data() + r * kShard;
      for (size_t at = 0; at < kShard; ++at) REQUIRE(shard[at] == content(r, output, number));
    }
  }

  const int rank_;
  const int world_;
  DirectTransport& transport_;
  std::deque<Buffer> outputs_;
};

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 6);
  const int world = std::atoi(argv[3]);
  const int count = std::atoi(argv[4]);
  const int tickets = std::atoi(argv[5]);
  return run_ranks(world, [&](int rank) {
    auto transport = join(argv[1], argv[2], rank, world, std::chrono::minutes(1), /*queues=*/0,
                          /*defer=*/false, tickets);
    {
      Outputs outputs(rank, world, count, *transport);
      outputs.round(0);
      const long opened = opens();
      outputs.round(1);
      if (tickets >= count) REQUIRE(opens() == opened);
    }
    REQUIRE(soon([] { return standin_mapped() == 0; }));
    transport.reset();
  });
}
