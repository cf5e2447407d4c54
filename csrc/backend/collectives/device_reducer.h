// Sums landed slices of CUDA tensors with the kernels of kernels.h.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "backend/collectives/kernels.h"
#include "backend/collectives/reduction.h"
#include "transport/call.h"

namespace pg_sdma {

// How landings are cut.
struct LandingShape {
  size_t room = 0;  // bytes of each peer's slice that land at a time
  int count = 1;    // of landings
};

// `slice_bytes`: of one rank's slices of all tensors, for which there is no need of more room.
// All landings take at most `most_bytes`; only where that is not enough for kLeastRoom bytes of
// each peer do they take more.
LandingShape landing_shape(size_t slice_bytes, size_t most_bytes, size_t peers);

class DeviceReducer final : public Reducer {
 public:
  // One tensor of the call.
  struct Tensor {
    kernels::Kernel kernel;
    size_t element = 0;  // bytes
  };

  // Takes the landings of landing_shape() from torch's allocator, at once, for the current stream
  // of `device`.
  DeviceReducer(Reduction reduction, int rank, int world, std::vector<Tensor> tensors,
                size_t slice_bytes, size_t most_bytes, at::Device device);

  int landings() const override { return shape_.count; }
  size_t room() const override { return shape_.room; }
  void* landing(int which, int peer) override;
  Launch launch(const Share& share, size_t offset, size_t bytes, int which, size_t at) override;

  // Whose memory the landings are.
  c10::Stream stream() const { return stream_; }
  // Its memory is also in use by what `stream` holds now.
  void record_stream(c10::Stream stream) { memory_.record_stream(stream); }

 private:
  std::byte* base(int which) const;

  const Reduction reduction_;
  const int rank_;
  const size_t peers_;
  const std::vector<Tensor> tensors_;
  const c10::Stream stream_;
  const LandingShape shape_;
  at::Tensor memory_;  // the landings, each of a row for every peer
};

}  // namespace pg_sdma
