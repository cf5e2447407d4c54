// torch's CUDA device, on the stand-in: streams, events and tensors. For one translation unit.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <vector>

#include "group.h"

namespace standin_test {

namespace driver = pg_sdma::driver;

inline const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// torch's streams, by their ids; the first is the default one.
inline std::vector<Stream> handles;
inline int64_t pooled = 0;  // the one that stands for torch's pool
inline thread_local int64_t current = 0;

inline void make_streams(size_t number, int64_t of_pool) {
  handles.assign(number, nullptr);
  pooled = of_pool;
  for (size_t id = 1; id < number; ++id) {
    REQUIRE(driver::cuStreamCreateWithPriority(&handles[id], driver::kNonBlocking, 0) == 0);
  }
}

inline c10::Stream stream_of(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDevice.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_of(pooled);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = stream_of(current);
    current = stream.id();
    caller = handle(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle(stream); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) REQUIRE(driver::cuEventCreate(event, driver::kNoTiming) == 0);
    REQUIRE(driver::cuEventRecord(*event, handle(stream)) == 0);
  }
  void block(void* event, const c10::Stream& stream) const override {
    REQUIRE(driver::cuStreamWaitEvent(handle(stream), event, 0) == 0);
  }
  bool queryEvent(void* event) const override { return driver::cuEventQuery(event) == 0; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    driver::cuEventDestroy_v2(event);
  }

 private:
  static Stream handle(const c10::Stream& stream) {
    return handles.at(static_cast<size_t>(stream.id()));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

inline void turn_to(int64_t id) {
  c10::impl::VirtualGuardImpl(kDevice.type()).exchangeStream(stream_of(id));
}

// Bytes in the stand-in's device memory, which outlives the tensor.
inline at::Tensor tensor_at(void* data, at::IntArrayRef shape) {
  return at::for_blob(data, shape)
      .options(at::dtype(at::kByte).device(kDevice))
      .target_device(kDevice)
      .make_tensor();
}

}  // namespace standin_test
