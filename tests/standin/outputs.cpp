// Gathers into more outputs than a rank has tickets: all direct, every byte checked, nothing left
// open, and few questions to the driver.
//
//   outputs <driver> <folder> <ranks>
//
// <folder> is empty and the group's own.
#include <cstring>
#include <deque>

#include "group.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr size_t kShard = 5000;
constexpr int kOutputs = 2 * ControlPage::kTickets;  // each an allocation of its own
// A rank publishes one after the other. Were every ticket looked at for each of them there would be
// half the square: the thread that looks for freed memory five times a second is left some room.
constexpr long kMostQuestions = static_cast<long>(kOutputs) * kOutputs / 4;

long questions() { return standin_calls("cuPointerGetAttributes"); }

unsigned char content(int rank, int output, int round) {
  return static_cast<unsigned char>(1 + 5 * rank + 3 * output + 101 * round);
}

class Outputs {
 public:
  Outputs(int rank, int world, DirectTransport& transport)
      : rank_(rank), world_(world), transport_(transport) {
    for (int i = 0; i < kOutputs; ++i) outputs_.emplace_back(kShard * world);
  }

  // Into all outputs, as many at a time as one call carries.
  void round(int number) {
    for (int first = 0; first < kOutputs; first += kMaxTensors) {
      std::deque<Buffer> inputs;
      Call call;
      call.operation = "outputs";
      call.dtype = "uint8";
      call.timeout = std::chrono::minutes(1);
      for (int i = first; i < first + kMaxTensors; ++i) {
        std::memset(outputs_[i].data(), 0xA5, outputs_[i].bytes());
        Buffer& input = inputs.emplace_back(kShard);
        std::memset(input.data(), content(rank_, i, number), kShard);
        Piece piece{input.data(), kShard, {}};
        for (int r = 0; r < world_; ++r) piece.outputs.push_back(outputs_[i].data() + r * kShard);
        call.pieces.push_back(std::move(piece));
      }
      REQUIRE(transport_.agree(call).direct);
      transport_.queue().use_callers_stream();
      transport_.carry(call);
      REQUIRE(cuStreamSynchronize(caller) == 0);
      for (int i = first; i < first + kMaxTensors; ++i) look(i, number);
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
  REQUIRE(argc == 4);
  const int world = std::atoi(argv[3]);
  return run_ranks(world, [&](int rank) {
    auto transport = join(argv[1], argv[2], rank, world, std::chrono::minutes(1));
    {
      Outputs outputs(rank, world, *transport);
      const long before = questions();
      outputs.round(0);
      const long asked = questions() - before;
      if (asked > kMostQuestions) std::fprintf(stderr, "rank %d: %ld questions\n", rank, asked);
      REQUIRE(asked <= kMostQuestions);
      outputs.round(1);
    }
    REQUIRE(soon([] { return standin_mapped() == 0; }));
    transport.reset();
  });
}
