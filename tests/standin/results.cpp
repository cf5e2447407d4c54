// What the Works of calls on device tensors give, on the stand-in: the same future and result
// whichever way a call went, and the inner's. Needs torch, but no GPU: here "CUDA" is the stand-in.
//
//   results <driver>
#include <ATen/ATen.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "group.h"
#include "torch_device.h"

// In one translation unit, as in chain_order.cpp.
#include "backend/collectives/arguments.cpp"
#include "backend/collectives/coalesced_gather.cpp"
#include "backend/collectives/collective.cpp"
#include "backend/collectives/gather.cpp"
#include "backend/order/joint_work.cpp"
#include "backend/order/stream_chain.cpp"
#include "backend/order/stream_work.cpp"

using namespace pg_sdma;
using namespace standin_test;

namespace {

constexpr int kWorld = 2;
constexpr size_t kShard = 24;

enum Id : int64_t { kCaller, kPooled, kInner, kStreams };

at::Tensor new_tensor(at::IntArrayRef sizes, std::optional<at::ScalarType>,
                      std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                      std::optional<at::MemoryFormat>) {
  auto& memory = *new Buffer(static_cast<size_t>(c10::multiply_integers(sizes)));
  return tensor_at(memory.data(), sizes);
}

at::Tensor& copy_bytes(at::Tensor& to, const at::Tensor& from, bool) {
  REQUIRE(to.nbytes() == from.nbytes());
  REQUIRE(driver::cuMemcpyAsync(reinterpret_cast<Address>(to.data_ptr()),
                                reinterpret_cast<Address>(from.data_ptr()), to.nbytes(),
                                caller) == 0);
  return to;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("empty.memory_format", TORCH_FN(new_tensor));
  library.impl("copy_", TORCH_FN(copy_bytes));
}

// As NCCL's: complete once it is enqueued, and its future orders streams.
class NcclWork final : public c10d::Work {
 public:
  explicit NcclWork(Tensors outputs)
      : future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(),
                                                         std::vector<c10::Device>{kDevice})) {
    const c10::impl::VirtualGuardImpl guard(kDevice.type());
    const StreamGuard on_inner(guard, stream_of(kInner));
    future_->markCompleted(c10::IValue(std::move(outputs)));
  }
  void synchronize() override { REQUIRE(false); }  // would let go of the call's tensors
  bool wait(std::chrono::milliseconds) override {
    future_->wait();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Nccl final : public c10d::Backend {
 public:
  Nccl() : Backend(0, kWorld) {}
  const std::string getBackendName() const override { return "nccl"; }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    for (at::Tensor& output : outputs[0]) copy(output.data_ptr(), inputs[0]);
    return c10::make_intrusive<NcclWork>(Tensors{outputs[0][0]});
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    for (int r = 0; r < kWorld; ++r) {
      copy(static_cast<char*>(output.data_ptr()) + r * input.nbytes(), input);
    }
    return c10::make_intrusive<NcclWork>(Tensors{output});
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t t = 0; t < outputs.size(); ++t) _allgather_base(outputs[t], inputs[t], options);
    return c10::make_intrusive<NcclWork>(outputs);
  }

 private:
  static void copy(void* to, const at::Tensor& from) {
    REQUIRE(driver::cuMemcpyAsync(reinterpret_cast<Address>(to),
                                  reinterpret_cast<Address>(from.data_ptr()), from.nbytes(),
                                  handles[kInner]) == 0);
  }
};

class NoWaiter final : public Waiter {
  void wait(Counter&, uint64_t) override {}
  void wrote() override {}
};

// Gathers of ranks that have all the same shards: direct, or, as of a rank that is late, the
// inner's.
class Ways final : public Carrier {
 public:
  Ways(Chain& chain, std::unique_ptr<Queue> queue) : chain_(chain), queue_(std::move(queue)) {}

  std::vector<WorkPtr> carry(Collective& collective) override {
    collective.lay_out();
    REQUIRE(collective.call.invalid.empty());
    std::vector<WorkPtr> works;
    const size_t tensors = collective.tensors();
    for (size_t first = 0; first < tensors; ++first) {
      if (direct && !(half && first > 0)) {
        chain_.before_direct(*queue_);
        run_direct(collective.part(first, first + 1));
        continue;
      }
      chain_.before_inner();
      for (const WorkPtr& work : collective.part_on_inner(inner_, first, first + 1)) {
        chain_.after_inner(work);
        works.push_back(work);
      }
    }
    return works;
  }

  bool direct = false;
  bool half = false;  // of several tensors the first alone is direct

 private:
  void run_direct(const Call& call) {
    for (const Piece& piece : call.pieces) {
      for (void* output : piece.outputs) {
        queue_->run({Step::copy(output, 0, reinterpret_cast<uintptr_t>(piece.input), piece.bytes)},
                    no_waiter_);
      }
    }
  }

  Chain& chain_;
  std::unique_ptr<Queue> queue_;
  NoWaiter no_waiter_;
  Nccl inner_;
};

struct Arguments {
  Arguments(Gather::Form form, size_t tensors) : form(form) {
    unsigned char* next = memory.data();
    for (size_t t = 0; t < tensors; ++t) {
      std::memset(next, static_cast<int>(t + 1), kShard);
      inputs.push_back(tensor_at(next, {2, 12}));
      next += kShard;
    }
    std::memset(next, 0xA5, kWorld * tensors * kShard);
    for (size_t t = 0; t < (form == Gather::Form::kList ? kWorld : tensors); ++t) {
      const int64_t rows = form == Gather::Form::kList ? 2 : 2 * kWorld;
      outputs.push_back(tensor_at(next, {rows, 12}));
      next += outputs.back().nbytes();
    }
    options.asyncOp = true;
  }
  std::shared_ptr<Gather> gather() const {
    auto gather = std::make_shared<Gather>(form, 0, kWorld, outputs, inputs, options);
    gather->inner = "nccl";
    return gather;
  }

  const Gather::Form form;
  const Buffer& memory = *new Buffer(1 << 12);  // freeing it would wait for the streams
  Tensors inputs, outputs;
  c10d::AllgatherOptions options;
};

// What NCCL gives: the outputs, and of a list one tensor.
void are_right(const Arguments& call, const Tensors& results) {
  REQUIRE(cuStreamSynchronize(caller) == 0);
  if (call.form == Gather::Form::kList) {
    REQUIRE(results.size() == 1);
    REQUIRE(results[0].sizes() == at::IntArrayRef({kWorld, 2, 12}));
    const auto* bytes = static_cast<const unsigned char*>(results[0].data_ptr());
    REQUIRE(std::all_of(bytes, bytes + kWorld * kShard, [](unsigned char b) { return b == 1; }));
    return;
  }
  REQUIRE(results.size() == call.outputs.size());
  for (size_t t = 0; t < results.size(); ++t) {
    REQUIRE(results[t].is_same(call.outputs[t]));
    const auto* bytes = static_cast<const unsigned char*>(results[t].data_ptr());
    REQUIRE(
        std::all_of(bytes, bytes + kWorld * kShard, [&](unsigned char b) { return b == t + 1; }));
  }
}

void ask(Chain& chain, Ways& ways) {
  using Form = Gather::Form;
  for (const auto& [form, tensors] :
       {std::pair{Form::kIntoTensor, 1}, {Form::kIntoTensorCoalesced, 3}, {Form::kList, 1}}) {
    for (const bool by_future : {true, false}) {
      turn_to(kCaller);
      const Arguments call(form, static_cast<size_t>(tensors));
      const WorkPtr work = chain.run(call.gather(), ways);
      if (by_future) {
        const auto future = work->getFuture();
        REQUIRE(future == work->getFuture());
        future->wait();
        are_right(call, future->value().toTensorVector());
      } else {
        are_right(call, work->result());
      }
      work->wait();
      REQUIRE(cuStreamSynchronize(caller) == 0);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 2);
  const auto engine = engine_by(argv[1], 0);
  enter(0);
  make_streams(kStreams, kPooled);
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(page != MAP_FAILED);
  const auto chain = make_stream_chain(kDevice.type());
  Ways ways(*chain, engine->queue(page, 4096));
  ask(*chain, ways);  // late, before anything went direct
  ways.direct = true;
  ask(*chain, ways);
  ways.half = true;
  ask(*chain, ways);
  ways.direct = ways.half = false;
  ask(*chain, ways);  // late, after something did
  chain->stop(false);
  chain->let_go();
  std::printf("the inner's\n");
  std::fflush(stdout);
  std::_Exit(0);  // torch's statics outlive the stand-in's threads
}
