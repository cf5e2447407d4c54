// The chain of device tensors on the stand-in: whichever streams, routes and Works the collectives
// of a group use, they come one after another on the device. Needs torch, but no GPU: here "CUDA"
// is the stand-in.
//
//   chain_order <driver> <collectives> <seed>
//
// Collective k copies byte k - 1 to byte k; the first byte is 1, and so must be all in the end.
#include <ATen/ATen.h>

#include <random>
#include <thread>

#include "group.h"
#include "torch_device.h"

// With the chain, in one translation unit: torch's headers take longer than all else.
#include "backend/collectives/arguments.cpp"
#include "backend/collectives/collective.cpp"
#include "backend/order/joint_work.cpp"
#include "backend/order/stream_chain.cpp"
#include "backend/order/stream_work.cpp"

using namespace pg_sdma;
using namespace standin_test;

namespace {

// torch's streams, by their ids: callers' (the default one first), of its pool, the inner's, and
// one to be captured.
enum Id : int64_t { kCallers = 3, kPooled = kCallers, kInner, kCaptured, kStreams };

at::Tensor byte_at(void* data) { return tensor_at(data, {1}); }

class OneByte final : public Collective {
 public:
  OneByte(unsigned char* data, bool async)
      : Collective(c10d::OpType::ALLGATHER, 0, 1, {byte_at(data)}, {byte_at(data - 1)}, async) {}
  const char* name() const override { return "one_byte"; }
  WorkPtr on_inner(c10d::Backend&) override { return nullptr; }
  size_t tensors() const override { return 1; }
  Call part(size_t, size_t) const override { return call; }
  void run(DirectTransport&, const Call&, const Operation&) override {}
  std::vector<WorkPtr> part_on_inner(c10d::Backend&, size_t, size_t) override { return {}; }
  Step step() const {
    return Step::copy(outputs_[0].data_ptr(), 0, reinterpret_cast<uintptr_t>(inputs_[0].data_ptr()),
                      1);
  }

 private:
  void add_tensors() override {}
  void forget_tensors() override {}
};

class NoWaiter final : public Waiter {
  void wait(Counter&, uint64_t) override {}
  void wrote() override {}
};

class OneQueue final : public Carrier {
 public:
  OneQueue(Chain& chain, std::unique_ptr<Queue> queue) : chain_(chain), queue_(std::move(queue)) {}
  Queue& queue() { return *queue_; }
  void wait(Counter& counter) { queue_->run({Step::wait(counter, 1)}, no_waiter_); }
  std::vector<WorkPtr> carry(Collective& collective) override {
    chain_.before_direct(*queue_);
    queue_->run({static_cast<OneByte&>(collective).step()}, no_waiter_);
    return {};
  }

 private:
  Chain& chain_;
  std::unique_ptr<Queue> queue_;
  NoWaiter no_waiter_;
};

class InnerWork final : public c10d::Work {
 public:
  explicit InnerWork(c10::intrusive_ptr<c10::ivalue::Future> future) : future_(std::move(future)) {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// As NCCL: a synchronous operation on the current stream, an asynchronous one on a stream of its
// own, and all of a communicator in order.
class Inner {
 public:
  Inner() { REQUIRE(driver::cuEventCreate(&last_, driver::kNoTiming) == 0); }

  WorkPtr copy(unsigned char* to, bool async) {
    const auto at = reinterpret_cast<Address>(to);
    if (!async) {
      enqueue(at, caller);
      return nullptr;
    }
    driver::Event event = nullptr;
    REQUIRE(driver::cuEventCreate(&event, driver::kNoTiming) == 0);
    REQUIRE(driver::cuEventRecord(event, caller) == 0);
    REQUIRE(driver::cuStreamWaitEvent(handles[kInner], event, 0) == 0);
    REQUIRE(driver::cuEventDestroy_v2(event) == 0);
    enqueue(at, handles[kInner]);
    const int64_t before = current;
    turn_to(kInner);
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{kDevice});
    future->markCompleted(c10::IValue(std::vector<at::Tensor>{byte_at(to)}));
    turn_to(before);
    return c10::make_intrusive<InnerWork>(std::move(future));
  }

 private:
  void enqueue(Address at, Stream stream) {
    REQUIRE(driver::cuStreamWaitEvent(stream, last_, 0) == 0);
    REQUIRE(driver::cuMemcpyAsync(at, at - 1, 1, stream) == 0);
    REQUIRE(driver::cuEventRecord(last_, stream) == 0);
  }

  driver::Event last_ = nullptr;
};

// One that a graph records, while others run.
void capture(Chain& chain, const std::function<void()>& meanwhile) {
  const int64_t before = current;
  REQUIRE(cuStreamBeginCapture_v2(handles[kCaptured], 0) == 0);
  turn_to(kCaptured);
  chain.before_inner();
  chain.after_inner(nullptr);
  turn_to(before);
  meanwhile();
  void* graph = nullptr;
  REQUIRE(cuStreamEndCapture(handles[kCaptured], &graph) == 0);
}

// What a group leaves behind whose last operation a peer never takes part in: the tensors, into
// which the peer may still push, and no use of the queue that has gone.
void leave_one_pending(Engine& engine) {
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(page != MAP_FAILED);
  turn_to(0);
  const auto chain = make_stream_chain(kDevice.type());
  auto direct = std::make_unique<OneQueue>(*chain, engine.queue(page, 4096));
  const Buffer& bytes = *new Buffer(3);  // freeing it would wait for the stream
  const auto gather = [&](size_t k) {
    auto collective = std::make_shared<OneByte>(bytes.data() + k, /*async=*/true);
    const std::weak_ptr<Collective> dropped = collective;
    chain->run(std::move(collective), *direct);  // nobody has the Work
    return dropped;
  };
  const auto over = gather(1);
  REQUIRE(soon([mark = direct->queue().mark()] { return mark->passed(); }));
  direct->wait(*static_cast<Counter*>(page));
  const auto pending = gather(2);
  chain->stop(false);
  REQUIRE(!pending.expired());
  direct.reset();
  chain->let_go();
  REQUIRE(over.expired());
  REQUIRE(!pending.expired());
  chain->before_inner();
}

// What the caller enqueues behind an asynchronous call does not wait for it; behind a synchronous
// one it does.
void an_asynchronous_call_leaves_the_callers_stream_free(Engine& engine, bool async) {
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* gate = static_cast<Counter*>(page);
  const Buffer bytes(2);
  const auto chain = make_stream_chain(kDevice.type());
  class Gated final : public Carrier {
   public:
    Gated(Chain& chain, OneQueue& queue, Counter& gate)
        : chain_(chain), queue_(queue), gate_(gate) {}
    std::vector<WorkPtr> carry(Collective&) override {
      chain_.before_direct(queue_.queue());
      queue_.wait(gate_);
      return {};
    }

   private:
    Chain& chain_;
    OneQueue& queue_;
    Counter& gate_;
  };
  OneQueue direct(*chain, engine.queue(page, 4096));
  Gated gated(*chain, direct, *gate);
  turn_to(1);
  const WorkPtr work = chain->run(std::make_shared<OneByte>(bytes.data() + 1, async), gated);
  driver::Event behind = nullptr;
  REQUIRE(driver::cuEventCreate(&behind, driver::kNoTiming) == 0);
  REQUIRE(driver::cuEventRecord(behind, caller) == 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  REQUIRE((driver::cuEventQuery(behind) == 0) == async);
  gate->store(1);
  REQUIRE(soon([&] { return driver::cuEventQuery(behind) == 0; }));
  REQUIRE(cuStreamSynchronize(caller) == 0);
  chain->let_go();
}

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 4);
  const auto collectives = static_cast<size_t>(std::atoi(argv[2]));
  std::minstd_rand random(static_cast<unsigned>(std::atoi(argv[3])));
  const auto engine = engine_by(argv[1], 0);
  enter(0);
  make_streams(kStreams, kPooled);
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(page != MAP_FAILED);

  const Buffer bytes(collectives + 1);
  bytes.data()[0] = 1;
  const auto chain = make_stream_chain(kDevice.type());
  OneQueue direct(*chain, engine->queue(page, 4096));
  Inner inner;
  std::vector<WorkPtr> works;
  for (size_t k = 1; k <= collectives; ++k) {
    turn_to(static_cast<int64_t>(random() % kCallers));
    unsigned char* const to = bytes.data() + k;
    const bool async = random() % 2 == 0;
    const bool first = k == 1;  // then even the first direct one comes beside a capture
    const auto make = [&] {
      if (first || random() % 2 == 0) {
        works.push_back(chain->run(std::make_shared<OneByte>(to, async), direct));
        return;
      }
      chain->before_inner();
      WorkPtr work = inner.copy(to, async);
      chain->after_inner(work);
      if (random() % 2 == 0) works.push_back(std::move(work));  // or it is dropped at once
    };
    if (first || random() % 4 == 0) {
      const bool beside = first || random() % 2 == 0;
      capture(*chain, [&] {
        if (beside) make();
      });
      if (beside) continue;
    }
    make();
    if (!works.empty() && works.back() && random() % 4 == 0) works.back()->getFuture()->wait();
  }
  for (const Stream stream : handles) REQUIRE(cuStreamSynchronize(stream) == 0);
  for (const auto& work : works) {
    if (work && dynamic_cast<StreamWork*>(work.get()) != nullptr) {
      REQUIRE(soon([&] { return work->isCompleted(); }));
    }
  }
  for (size_t k = 0; k <= collectives; ++k) REQUIRE(bytes.data()[k] == 1);
  works.clear();
  chain->stop(false);
  chain->let_go();
  if (std::string(argv[1]).rfind("hip:", 0) != 0) {  // whose streams share hardware queues
    for (const bool async : {true, false}) {
      an_asynchronous_call_leaves_the_callers_stream_free(*engine, async);
    }
  }
  leave_one_pending(*engine);
  std::printf("in order\n");
  std::fflush(stdout);
  std::_Exit(0);  // torch's statics outlive the stand-in's threads
}
