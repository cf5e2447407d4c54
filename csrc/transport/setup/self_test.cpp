#include "transport/setup/self_test.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <thread>

#include "engine/inject.h"
#include "transport/setup/copy_speed.h"

namespace pg_sdma {
namespace {

using Milliseconds = std::chrono::milliseconds;

constexpr size_t kOffset = 3;  // shards start at odd addresses
constexpr size_t kSizes[] = {1, 4099, size_t{1} << 20};
constexpr size_t kHeldBytes = 4099;
constexpr size_t kMeasuredBytes = size_t{8} << 20;
constexpr unsigned char kPoison = 255;  // no shard has it

// How long a rank is held back: a wait that does not wait ends in microseconds.
constexpr Milliseconds kHeld{20};

std::vector<unsigned char> shard_of(int rank, size_t bytes) {
  std::vector<unsigned char> shard(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    const size_t value = i * static_cast<size_t>(2 * rank + 3) + static_cast<size_t>(rank) * 7;
    shard[i] = static_cast<unsigned char>(value % 251);
  }
  return shard;
}

class Test {
 public:
  Test(DirectTransport& transport, TestMemory& memory, const SelfTest& test)
      : transport_(transport), memory_(memory), test_(test), world_(test.world) {}

  TestResult run() {
    found_.wrong = run_all();
    return found_;
  }

 private:
  std::string run_all() {
    std::vector<size_t> sizes(std::begin(kSizes), std::end(kSizes));
    for (const size_t bytes : test_.doubts.copy_sizes) {
      sizes.insert(sizes.end(), {bytes - 1, bytes, bytes + 1});
    }
    // Where shards are pushed, those of lists and what reduce-scatters sum are pulled.
    const bool both_ways = transport_.pushes();
    for (const size_t bytes : sizes) {
      for (const bool listed : both_ways ? std::vector{false, true} : std::vector{false}) {
        Gather gather(*this, bytes, nullptr, listed);
        if (const auto refusal = gather.agree()) return *refusal;
        if (const std::string wrong = gather.carry(); !wrong.empty()) return wrong;
      }
    }
    if (transport_.page().late() > 0 && world_ > 1) {
      if (const std::string wrong = measure(); !wrong.empty()) return wrong;
    }
    // An external all-gather's waits are its own.
    if (!test_.doubts.waits || !test_.stream_ordered || transport_.has_external()) return "";
    if (const std::string wrong = hold_back(0); !wrong.empty()) return wrong;
    return hold_back(world_ - 1);
  }

  // One all-gather of a shard a rank.
  class Gather {
   public:
    Gather(Test& test, size_t bytes, char* input = nullptr, bool listed = false)
        : test_(test), bytes_(bytes), input_(input) {
      if (input_ == nullptr) {
        input_ = test.memory_.allocate(bytes + kOffset) + kOffset;
        test.memory_.put(input_, shard_of(test.test_.rank, bytes));
      }
      const size_t whole = bytes * static_cast<size_t>(test.world_) + kOffset;
      output_ = test.memory_.allocate(whole);
      test.memory_.put(output_, std::vector<unsigned char>(whole, kPoison));
      call_ = test.call_into(output_ + kOffset, input_, bytes);
      call_.listed = listed;
    }

    char* input() const { return input_; }

    // Why it does not go direct.
    std::optional<std::string> agree() { return test_.agree(call_, operation_); }
    const Operation& operation() const { return operation_; }

    // Enqueues it, or carries it out.
    void start() { test_.transport_.run(call_, operation_); }

    // What is wrong with it.
    std::string finish() {
      if (const std::string hangs = test_.wait_for_end(operation_, bytes_); !hangs.empty())
        return hangs;
      test_.transport_.queue().caller_follows();
      const size_t whole = bytes_ * static_cast<size_t>(test_.world_);
      std::vector<unsigned char> got = test_.memory_.get(output_, kOffset + whole);
      if (inject::corrupts("self-test")) got[kOffset] ^= 1;
      for (int r = 0; r < test_.world_; ++r) {
        const auto first = got.begin() + static_cast<ptrdiff_t>(kOffset + bytes_ * size_t(r));
        const std::vector<unsigned char> right = shard_of(r, bytes_);
        if (!std::equal(right.begin(), right.end(), first)) {
          const auto size = static_cast<ptrdiff_t>(bytes_);
          const bool nothing =
              std::all_of(first, first + size, [](unsigned char byte) { return byte == kPoison; });
          return std::string("the self-test got ") + (nothing ? "nothing" : "wrong bytes") +
                 " from rank " + std::to_string(r) + " at shards of " + std::to_string(bytes_) +
                 " bytes";
        }
      }
      if (std::any_of(got.begin(), got.begin() + kOffset,
                      [](unsigned char byte) { return byte != kPoison; })) {
        return "the self-test wrote in front of its output";
      }
      return "";
    }

    std::string carry() {
      start();
      return finish();
    }

   private:
    Test& test_;
    size_t bytes_;
    char* input_;
    char* output_ = nullptr;
    Call call_;
    Operation operation_;
  };

  Call call_into(char* output, const char* input, size_t bytes) const {
    Call call;
    call.operation = "self-test";
    call.dtype = "Byte";
    call.trial = true;
    Piece piece{input, bytes, {}};
    for (int r = 0; r < world_; ++r) {
      piece.outputs.push_back(output + static_cast<size_t>(r) * bytes);
    }
    call.pieces.push_back(std::move(piece));
    return call;
  }

  // Why `call` does not go direct.
  std::optional<std::string> agree(Call& call, Operation& operation) {
    const auto left = test_.deadline - Clock::now();
    call.timeout = std::max(std::chrono::duration_cast<Milliseconds>(left), Milliseconds(1));
    transport_.queue().follow_caller();
    operation = transport_.agree(call);
    if (operation.decision.direct) return std::nullopt;
    return operation.decision.here;
  }

  // What copies take, for the wait policy of all ranks. Only rank 0 copies, so that its copies have
  // the links to themselves: the others wait for it in the next step of the vote.
  std::string measure() {
    char* output = memory_.allocate(static_cast<size_t>(world_) * kMeasuredBytes);
    Call call = call_into(output, output + static_cast<size_t>(test_.rank) * kMeasuredBytes,
                          kMeasuredBytes);
    Operation operation;
    if (const auto refusal = agree(call, operation)) return *refusal;
    transport_.run(call, operation);
    const std::string hangs = wait_for_end(operation, kMeasuredBytes);
    if (!hangs.empty()) return hangs;
    if (test_.rank == 0) found_.copies = measure_copies(transport_, operation);
    return "";
  }

  std::string wait_for_end(const Operation& operation, size_t bytes) {
    if (!test_.stream_ordered) return "";
    const auto started = Clock::now();
    // Half of what is left: the ranks have to tell each other, and may then try an external
    // all-gather.
    const auto end =
        started + std::min<Clock::duration>((test_.deadline - started) / 2, test_.patience);
    const std::shared_ptr<Queue::Marker> last = transport_.queue().mark();
    while (!last->passed()) {
      transport_.check(operation);
      if (Clock::now() >= end) {
        const auto waited = std::chrono::duration_cast<Milliseconds>(Clock::now() - started);
        return "the self-test's copies of " + std::to_string(bytes) +
               " bytes have not ended after " + std::to_string(waited.count()) + " ms";
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return "";
  }

  // All ranks gather, but the stream of rank `held` is not ready before its host says so.
  std::string hold_back(int held) {
    const bool is_held = held == test_.rank;
    ControlPage& page = transport_.page();
    Gather gather(*this, kHeldBytes);
    Gather next(*this, kHeldBytes, gather.input());  // nothing to open any more
    if (const auto refusal = gather.agree()) return *refusal;
    const uint64_t number = gather.operation().number;
    // However this ends: a stream that waits would hold the device for ever.
    struct Release {
      Counter* counter;
      uint64_t number;
      ~Release() {
        if (counter != nullptr && *counter < number) *counter = number;
      }
    } release{is_held ? &page.ready(held) : nullptr, number};
    if (is_held) transport_.queue().run({Step::wait(page.ready(held), number)}, no_waiter_);
    gather.start();
    if (const auto refusal = next.agree()) return *refusal;  // all ranks have enqueued the first
    std::string early;
    if (is_held) {
      for (const auto end = Clock::now() + kHeld; early.empty() && Clock::now() < end;) {
        early = who_has_not_waited(number);
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      page.ready(held) = number;
    }
    next.start();
    const std::string wrong = gather.finish();
    if (!early.empty() || !wrong.empty()) return early.empty() ? wrong : early;
    return next.finish();
  }

  // Nobody can be done with what this rank is not ready for.
  std::string who_has_not_waited(uint64_t number) const {
    for (int rank = 0; rank < world_; ++rank) {
      if (transport_.page().done(rank) < number) continue;
      return "a wait in the stream of rank " + std::to_string(rank) + " ended early";
    }
    return "";
  }

  class NoWaiter final : public Waiter {
    void wait(Counter&, uint64_t) override {}
    void wrote() override {}
  };

  DirectTransport& transport_;
  TestMemory& memory_;
  const SelfTest& test_;
  const int world_;
  NoWaiter no_waiter_;
  TestResult found_;
};

}  // namespace

TestResult self_test(DirectTransport& transport, TestMemory& memory, const SelfTest& test) {
  // Left with work under way, the stream may go on using the memory, and so may a peer's whose
  // copies hang: its counters do not tell. And peers may have enqueued waits for what this rank,
  // which heard of trouble first, has not.
  const auto leave = [&](bool all_enqueued) {
    if (!test.stream_ordered) return;
    const bool ended = all_enqueued && transport.queue().mark()->passed();
    memory.keep();
    transport.abandon(/*copies=*/!ended);
  };
  try {
    TestResult result = Test(transport, memory, test).run();
    if (!result.wrong.empty()) leave(true);
    return result;
  } catch (const GroupFault&) {
    leave(true);
    throw;
  } catch (...) {
    leave(false);  // peers wait for what the driver, or an external all-gather, has refused to
                   // enqueue
    throw;
  }
}

}  // namespace pg_sdma
