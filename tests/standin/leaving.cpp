// A rank that leaves its group while its device has work pending, on the stand-in, one case a run.
//
//   leaving <driver> <folder> <case>
//
// Two ranks, whose device is busy for longer than a drain before the gather, and leave:
//   backlog         both make the call and leave
//   apart           the same; rank 1 leaves once rank 0 has long departed
//   late            rank 1 comes late and the gather goes in order of arrival
//   departed        rank 1 departs without waiting for its copies, which go on
//   died-departed   the same, and rank 1 dies before they run
//   killed          rank 1 is killed while rank 0 leaves
//   left            rank 1 has left without having made the call
//   never           rank 1 never makes the call
//   aborted         rank 0 aborts the group while it leaves
//   failed          rank 0's device fails while it leaves
// Prints how each rank ended, in the order of ranks.
#include <signal.h>

#include <array>
#include <cstring>
#include <thread>

#include "group.h"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr std::chrono::milliseconds kTimeout{60000};
constexpr std::chrono::milliseconds kShortTimeout{
    5500};                                        // longer than a queue is patient by itself
constexpr std::chrono::milliseconds kBusy{2600};  // the same
constexpr std::chrono::milliseconds kMoment{500};
constexpr size_t kShard = 1000;

void work(void** arguments) {
  std::this_thread::sleep_for(std::chrono::milliseconds(*static_cast<uint64_t*>(arguments[0])));
}

void be_busy(std::chrono::milliseconds time) {
  std::array<uint64_t, 8> arguments{static_cast<uint64_t>(time.count())};
  std::array<void*, 8> pointers;
  for (size_t i = 0; i < pointers.size(); ++i) pointers[i] = &arguments[i];
  REQUIRE(driver::cuLaunchKernel(reinterpret_cast<void*>(&work), 1, 1, 1, 1, 1, 1, 0, caller,
                                 pointers.data(), nullptr) == 0);
}

class Rank {
 public:
  Rank(char** argv, int rank)
      : which_(argv[3]),
        rank_(rank),
        late_(which_ == "late" || which_ == "left" || which_ == "never") {
    std::optional<std::chrono::microseconds> patience;
    if (!late_) patience = std::chrono::minutes(1);
    transport_ = join(argv[1], argv[2], rank, 2, patience, /*queues=*/0, /*defer=*/late_);
    output_ = std::make_unique<Buffer>(2 * kShard);
    std::memset(output_->data(), 0xA5, output_->bytes());
    std::memset(output_->data() + rank_ * kShard, rank_ + 1, kShard);
  }

  void run() {
    if (rank_ == 1 && (which_ == "left" || which_ == "never")) {
      if (which_ == "left") transport_.reset();
      if (which_ == "never") std::this_thread::sleep_for(kShortTimeout);
      std::this_thread::sleep_for(4 * kMoment);
      std::_Exit(0);  // a host that is at something else
    }
    if (rank_ == 1 && which_ == "late") std::this_thread::sleep_for(kBusy);
    gather();
    rank_ == 0 ? leave() : follow();
    REQUIRE(cuStreamSynchronize(caller) == 0);
    REQUIRE(complete());
  }

 private:
  void gather() {
    const bool ends = which_ == "backlog" || which_ == "apart" || which_ == "departed" || late_;
    be_busy(ends ? kBusy : kTimeout);
    const auto timeout = which_ == "never" ? kShortTimeout : kTimeout;
    const Call call = gather_in_place(output_->data(), kShard, rank_, 2, timeout);
    const Operation operation = transport_->agree(call);
    REQUIRE(operation.decision.direct);
    REQUIRE(operation.in_order_of_arrival() == late_);
    transport_->queue().use_callers_stream();
    transport_->run(call, operation);
  }

  void leave() {
    std::thread beside;
    if (which_ == "aborted" || which_ == "failed") {
      beside = std::thread([this] {
        std::this_thread::sleep_for(kMoment);
        if (which_ == "aborted") transport_->abort("rank 0 aborted the group");
        if (which_ == "failed") standin_fail_next("cuEventQuery", 719);
      });
    }
    transport_->drain();
    if (which_ == "backlog" || which_ == "apart" || which_ == "late") REQUIRE(complete());
    if (beside.joinable()) beside.join();
    transport_.reset();
    if (which_ == "failed") std::_Exit(0);  // nothing on its device goes on
  }

  // What rank 1 does while rank 0 leaves.
  void follow() {
    if (which_ == "apart") std::this_thread::sleep_for(kBusy + 2 * kMoment);
    if (which_ == "killed") {
      std::this_thread::sleep_for(kMoment);
      raise(SIGKILL);
    }
    if (which_ != "departed" && which_ != "died-departed") transport_->drain();
    transport_.reset();
    if (which_ == "died-departed") {
      std::this_thread::sleep_for(kMoment);  // so that rank 0 has looked at its departure
      raise(SIGKILL);
    }
  }

  bool complete() const {
    for (size_t at = 0; at < output_->bytes(); ++at) {
      if (output_->data()[at] != 1 + at / kShard) return false;
    }
    return true;
  }

  const std::string which_;
  const int rank_;
  const bool late_;
  std::unique_ptr<DirectTransport> transport_;
  std::unique_ptr<Buffer> output_;
};

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 4);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      alarm(120);
      Rank(argv, rank).run();
      std::_Exit(0);
    }
    ranks.push_back(child);
  }
  for (int rank = 0; rank < 2; ++rank) {
    int status = 0;
    waitpid(ranks[rank], &status, 0);
    if (WIFEXITED(status)) std::printf("rank %d: exit code %d\n", rank, WEXITSTATUS(status));
    if (WIFSIGNALED(status)) std::printf("rank %d: signal %d\n", rank, WTERMSIG(status));
  }
}
