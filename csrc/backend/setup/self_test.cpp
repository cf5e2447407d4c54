#include "backend/setup/self_test.h"

#include <ATen/ATen.h>

#include <cstring>
#include <deque>
#include <vector>

#include "transport/setup/self_test.h"

namespace pg_sdma {
namespace {

class TensorMemory final : public TestMemory {
 public:
  explicit TensorMemory(c10::Device device) : device_(device) {}

  char* allocate(size_t bytes) override {
    tensors_.push_back(at::empty({static_cast<int64_t>(bytes)},
                                 at::TensorOptions().dtype(at::kByte).device(device_)));
    return static_cast<char*>(tensors_.back().mutable_data_ptr());
  }

  void put(char* to, const std::vector<unsigned char>& bytes) override {
    const auto size = static_cast<int64_t>(bytes.size());
    at::Tensor content = at::empty({size}, at::kByte);
    std::memcpy(content.mutable_data_ptr(), bytes.data(), bytes.size());
    view(to, size).copy_(content);
  }

  std::vector<unsigned char> get(const char* from, size_t bytes) override {
    const at::Tensor content = view(from, static_cast<int64_t>(bytes)).cpu();
    const auto* data = static_cast<const unsigned char*>(content.const_data_ptr());
    return {data, data + bytes};
  }

  void keep() override { new std::deque<at::Tensor>(tensors_); }

 private:
  at::Tensor view(const char* first, int64_t bytes) {
    for (const at::Tensor& tensor : tensors_) {
      const auto offset = first - static_cast<const char*>(tensor.const_data_ptr());
      if (offset >= 0 && offset + bytes <= tensor.numel()) return tensor.narrow(0, offset, bytes);
    }
    TORCH_INTERNAL_ASSERT(false, "not an address of the self-test");
  }

  const c10::Device device_;
  std::deque<at::Tensor> tensors_;
};

}  // namespace

std::unique_ptr<TestMemory> test_memory(c10::Device device) {
  return std::make_unique<TensorMemory>(device);
}

TestResult self_test(DirectTransport& transport, TestMemory& memory, const Engine& engine, int rank,
                     int world, std::chrono::steady_clock::time_point deadline) {
  SelfTest test;
  test.rank = rank;
  test.world = world;
  test.stream_ordered = engine.stream_ordered();
  test.doubts = engine.doubts();
  test.deadline = deadline;
  return self_test(transport, memory, test);
}

}  // namespace pg_sdma
