// Coalesced all-gathers that go to an inner: gloo is given tensors of a device one at a time, every
// other inner, and gloo for tensors of the CPU, the call as it is. Needs torch, but no GPU: here
// "CUDA" is the stand-in.
//
//   coalesced_gathers <driver> <seed>
#include <ATen/ATen.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <random>
#include <thread>

#include "group.h"
#include "torch_device.h"

// In one translation unit, as in chain_order.cpp.
#include "backend/collectives/arguments.cpp"
#include "backend/collectives/coalesced_gather.cpp"
#include "backend/collectives/collective.cpp"
#include "backend/collectives/gather.cpp"
#include "backend/order/joint_work.cpp"
#include "backend/order/stream_work.cpp"

using namespace pg_sdma;
using namespace standin_test;

// The rest of what a Gather needs to see device tensors as bytes knows all devices.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
}

namespace {

constexpr int kWorld = 3;
constexpr int kRank = 1;

enum Id : int64_t { kCaller, kPooled, kInner, kStreams };

// One gather as gloo does it: some time, on a thread of its own, it enqueues the copies to the
// device on a stream of its own, and then its future is complete.
class GlooWork final : public c10d::Work {
 public:
  GlooWork(std::vector<Address> outputs, Address input, size_t bytes)
      : outputs_(std::move(outputs)), input_(input), bytes_(bytes) {
    REQUIRE(driver::cuEventCreate(&copied_, driver::kNoTiming) == 0);
    REQUIRE(driver::cuCtxGetCurrent(&context_) == 0);
  }

  void run() {
    REQUIRE(driver::cuCtxPushCurrent_v2(context_) == 0);
    for (const Address output : outputs_) {
      REQUIRE(driver::cuMemcpyAsync(output, input_, bytes_, handles[kInner]) == 0);
    }
    REQUIRE(driver::cuEventRecord(copied_, handles[kInner]) == 0);
    future_->markCompleted(c10::IValue(std::vector<at::Tensor>()));
    finish();
  }
  void fail(const char* why) {
    const auto error = std::make_exception_ptr(std::runtime_error(why));
    future_->setError(error);
    finish(error);
  }

  void synchronize() override {
    REQUIRE(driver::cuStreamWaitEvent(handles.at(static_cast<size_t>(current)), copied_, 0) == 0);
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const std::vector<Address> outputs_;
  const Address input_;
  const size_t bytes_;
  driver::Event copied_ = nullptr;
  driver::Context context_ = nullptr;
  const c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
};

Address address(const at::Tensor& tensor) {
  return reinterpret_cast<Address>(tensor.const_data_ptr());
}

// All of its ranks have the same shards.
class Inner final : public c10d::Backend {
 public:
  explicit Inner(std::string name) : Backend(kRank, kWorld), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    REQUIRE(output.nbytes() == input.nbytes() * kWorld);
    std::vector<Address> outputs;
    for (int r = 0; r < kWorld; ++r) outputs.push_back(address(output) + r * input.nbytes());
    return add("_allgather_base", std::move(outputs), input, options);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    REQUIRE(outputs.size() == 1 && inputs.size() == 1 && outputs[0].size() == kWorld);
    std::vector<Address> addresses;
    for (const at::Tensor& output : outputs[0]) addresses.push_back(address(output));
    return add("allgather", std::move(addresses), inputs[0], options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&,
                                          const c10d::AllgatherOptions&) override {
    calls.push_back("allgather_into_tensor_coalesced");
    return nullptr;
  }
  WorkPtr allgather_coalesced(TensorLists&, Tensors&, const c10d::AllgatherOptions&) override {
    calls.push_back("allgather_coalesced");
    return nullptr;
  }

  std::vector<std::string> take_calls() { return std::exchange(calls, {}); }

  std::vector<std::string> calls;
  std::vector<c10::intrusive_ptr<GlooWork>> works;

 private:
  WorkPtr add(const char* call, std::vector<Address> outputs, const at::Tensor& input,
              const c10d::AllgatherOptions& options) {
    REQUIRE(options.asyncOp);
    calls.push_back(call);
    works.push_back(
        c10::make_intrusive<GlooWork>(std::move(outputs), address(input), input.nbytes()));
    return works.back();
  }

  const std::string name_;
};

// The tensors of a call, in one buffer: each input random, its outputs behind it poisoned.
struct Arguments {
  Arguments(Buffer& memory, std::minstd_rand& random, c10::Device device = kDevice) {
    unsigned char* next = memory.data();
    for (int t = 0; t < 3; ++t) {
      const auto size = static_cast<int64_t>(1 + random() % 300);
      inputs.push_back(make(next, size, device));
      for (int64_t i = 0; i < size; ++i) next[i] = static_cast<unsigned char>(random());
      next += size;
      outputs.push_back(make(next, size * kWorld, device));
      lists.resize(kWorld);
      for (int r = 0; r < kWorld; ++r) {
        for (int64_t i = 0; i < size; ++i) {
          next[r * size + i] = static_cast<unsigned char>(~(next - size)[i]);
        }
        lists[r].push_back(make(next + r * size, size, device));
      }
      next += kWorld * size;
    }
    options.asyncOp = true;
  }

  static at::Tensor make(void* data, int64_t size, c10::Device device) {
    return device.is_cpu() ? at::from_blob(data, {size}, at::kByte) : tensor_at(data, {size});
  }

  // Where the outputs are, or where they have been copied to, `offset` bytes on.
  bool right(ptrdiff_t offset = 0) const {
    for (size_t t = 0; t < inputs.size(); ++t) {
      const auto* input = reinterpret_cast<const char*>(address(inputs[t]));
      const auto* output = reinterpret_cast<const char*>(address(outputs[t])) + offset;
      for (int r = 0; r < kWorld; ++r) {
        if (std::memcmp(output + r * inputs[t].nbytes(), input, inputs[t].nbytes()) != 0) {
          return false;
        }
      }
    }
    return true;
  }

  Tensors inputs;
  Tensors outputs;
  TensorLists lists;
  c10d::AllgatherOptions options;
};

using Issue = std::function<WorkPtr(Inner&, Arguments&)>;

WorkPtr into_tensors(Inner& inner, Arguments& call) {
  return gather_into_tensors(inner, call.outputs, call.inputs, call.options);
}

WorkPtr into_lists(Inner& inner, Arguments& call) {
  return gather_into_lists(inner, call.lists, call.inputs, call.options);
}

std::shared_ptr<Gather> gather(const Arguments& call) {
  auto gather = std::make_shared<Gather>(Gather::Form::kIntoTensorCoalesced, kRank, kWorld,
                                         call.outputs, call.inputs, call.options);
  REQUIRE(gather->call.invalid.empty());
  return gather;
}

WorkPtr whole(Inner& inner, Arguments& call) { return gather(call)->on_inner(inner); }

WorkPtr late(Inner& inner, Arguments& call) {
  const auto works = gather(call)->part_on_inner(inner, 0, call.inputs.size());
  REQUIRE(works.size() == 1);
  return works.front();
}

// What waits for the Work, or for its future, follows every gather's copies on the device.
void one_by_one_and_in_order(const Issue& issue, const char* single, bool by_future,
                             std::minstd_rand& random) {
  Buffer memory(1 << 14);
  Arguments call(memory, random);
  Inner gloo("gloo");
  const WorkPtr work = issue(gloo, call);
  REQUIRE(gloo.take_calls() == std::vector<std::string>(3, single));
  const auto future = by_future ? work->getFuture() : nullptr;
  for (const size_t next : {2, 0, 1}) {
    REQUIRE(!work->isCompleted());
    REQUIRE(!future || !future->completed());
    std::thread([&] { gloo.works[next]->run(); }).join();
  }
  REQUIRE(work->isCompleted() && work->isSuccess());
  turn_to(kCaller);
  if (future) {
    future->wait();
    REQUIRE(work->getFuture() == future);
  } else {
    work->wait();
  }
  const size_t half = memory.bytes() / 2;
  REQUIRE(driver::cuMemcpyAsync(memory.base() + half, memory.base(), half, handles[kCaller]) == 0);
  REQUIRE(cuStreamSynchronize(handles[kCaller]) == 0);
  REQUIRE(call.right(static_cast<ptrdiff_t>(half)));
}

// A call of many tensors is several operations; each of them that goes to the inner takes its own.
void a_part_takes_its_own_tensors(std::minstd_rand& random) {
  Buffer memory(1 << 14);
  Arguments call(memory, random);
  Inner gloo("gloo");
  for (const auto& [first, last] : {std::pair<size_t, size_t>{1, 3}, {0, 1}}) {
    REQUIRE(!call.right());
    const auto works = gather(call)->part_on_inner(gloo, first, last);
    REQUIRE(works.size() == 1);
    for (auto& each : std::exchange(gloo.works, {})) std::thread([&] { each->run(); }).join();
    turn_to(kCaller);
    works.front()->wait();
    REQUIRE(cuStreamSynchronize(handles[kCaller]) == 0);
  }
  REQUIRE(call.right());
}

// NCCL takes dense tensors of any memory format and sends them as they lie; what is not dense, or
// lies otherwise than the first of a list, is another matter.
void memory_formats_are_taken_as_they_lie() {
  constexpr int64_t kImages = 2, kChannels = 3, kHeight = 4, kWidth = 5;
  constexpr int64_t kSize = kImages * kChannels * kHeight * kWidth;
  constexpr int64_t kImage = kSize / kImages;
  Buffer memory(8 * kSize);
  const auto tensor = [&](int64_t at, bool channels_last) {
    const at::Tensor flat = Arguments::make(memory.data() + at * kSize, 2 * kSize, kDevice);
    const std::vector<int64_t> strides =
        channels_last ? std::vector<int64_t>{kImage, 1, kWidth * kChannels, kChannels}
                      : std::vector<int64_t>{kImage, kHeight * kWidth, kWidth, 1};
    return flat.as_strided({kImages, kChannels, kHeight, kWidth}, strides);
  };
  const at::Tensor input = tensor(0, true);
  const Tensors alike{tensor(1, true), tensor(2, true), tensor(3, true)};
  const auto list = [&](Tensors outputs) {
    auto made = std::make_shared<Gather>(Gather::Form::kList, kRank, kWorld, std::move(outputs),
                                         Tensors{input}, c10d::AllgatherOptions());
    made->lay_out();
    return made;
  };
  const auto gathers = list(alike);
  REQUIRE(gathers->call.invalid.empty() && gathers->call.unable.empty());
  const Piece& piece = gathers->call.pieces.at(0);
  REQUIRE(piece.input == input.const_data_ptr() && piece.bytes == kSize);
  for (int r = 0; r < kWorld; ++r) REQUIRE(piece.outputs[r] == alike[r].const_data_ptr());
  REQUIRE(list({alike[0], tensor(2, false), alike[2]})->call.unable.find("lie differently") !=
          std::string::npos);
  const at::Tensor with_holes = input.as_strided({kImages, kChannels}, {2 * kChannels, 2});
  const Gather refused(Gather::Form::kIntoTensor, kRank, kWorld, {tensor(1, false)}, {with_holes},
                       c10d::AllgatherOptions());
  REQUIRE(refused.call.invalid.find("expected contiguous tensors") != std::string::npos);
}

void failures_are_told(std::minstd_rand& random) {
  Buffer memory(1 << 13);
  Arguments call(memory, random);
  Inner gloo("gloo");
  const WorkPtr work = into_lists(gloo, call);
  const auto future = work->getFuture();
  gloo.works[0]->run();
  gloo.works[1]->fail("lost a peer");
  gloo.works[2]->run();
  REQUIRE(future->hasError() && future->tryRetrieveErrorMessage() == "lost a peer");
  REQUIRE(work->isCompleted() && !work->isSuccess());
  try {
    work->wait();
    REQUIRE(false);
  } catch (const std::exception& error) {
    REQUIRE(std::string(error.what()) == "lost a peer");
  }
  REQUIRE(cuStreamSynchronize(handles[kInner]) == 0);
}

void others_get_the_call_as_it_is(std::minstd_rand& random) {
  Buffer memory(1 << 13);
  Arguments on_device(memory, random);
  Inner nccl("nccl"), gloo("gloo");
  REQUIRE(into_tensors(nccl, on_device) == nullptr);
  REQUIRE(into_lists(nccl, on_device) == nullptr);
  REQUIRE(whole(nccl, on_device) == nullptr);
  const std::string into_tensor = "allgather_into_tensor_coalesced", lists = "allgather_coalesced";
  REQUIRE(nccl.take_calls() == (std::vector<std::string>{into_tensor, lists, into_tensor}));

  Arguments on_cpu(memory, random, at::kCPU);
  REQUIRE(into_tensors(gloo, on_cpu) == nullptr);
  REQUIRE(into_lists(gloo, on_cpu) == nullptr);
  REQUIRE(whole(gloo, on_cpu) == nullptr);
  REQUIRE(gloo.take_calls() == (std::vector<std::string>{into_tensor, lists, into_tensor}));
}

// gloo refuses them before it touches the tensors.
void gloo_refuses_what_does_not_fit(std::minstd_rand& random) {
  Buffer memory(1 << 13);
  Inner gloo("gloo");
  Arguments fewer_outputs(memory, random), fewer_lists(memory, random), short_list(memory, random);
  fewer_outputs.outputs.pop_back();
  REQUIRE(into_tensors(gloo, fewer_outputs) == nullptr);
  fewer_lists.lists.pop_back();
  REQUIRE(into_lists(gloo, fewer_lists) == nullptr);
  short_list.lists.back().pop_back();
  REQUIRE(into_lists(gloo, short_list) == nullptr);
  Arguments nothing(memory, random);
  nothing.inputs.clear();
  nothing.outputs.clear();
  REQUIRE(into_tensors(gloo, nothing) == nullptr);
  REQUIRE(gloo.works.empty());
}

}  // namespace

int main(int argc, char** argv) {
  REQUIRE(argc == 3);
  std::minstd_rand random(static_cast<unsigned>(std::atoi(argv[2])));
  const auto engine = engine_by(argv[1], 0);
  enter(0);
  make_streams(kStreams, kPooled);
  for (const bool by_future : {false, true}) {
    one_by_one_and_in_order(into_tensors, "_allgather_base", by_future, random);
    one_by_one_and_in_order(into_lists, "allgather", by_future, random);
    one_by_one_and_in_order(whole, "_allgather_base", by_future, random);
    one_by_one_and_in_order(late, "_allgather_base", by_future, random);
  }
  a_part_takes_its_own_tensors(random);
  memory_formats_are_taken_as_they_lie();
  failures_are_told(random);
  others_get_the_call_as_it_is(random);
  gloo_refuses_what_does_not_fit(random);
  std::printf("one by one\n");
  std::fflush(stdout);
  std::_Exit(0);  // torch's statics outlive the stand-in's threads
}
