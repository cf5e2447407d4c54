// Sums landed slices of CUDA tensors with the kernels of kernels.h.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "backend/kernels.h"
#include "backend/reduction.h"
#include "transport/transport.h"

namespace pg_sdma {

class DeviceReducer final : public StreamReducer {
 public:
  // One tensor of the call.
  struct Tensor {
    kernels::Kernel kernel;
    size_t element = 0;  // bytes
  };

  // `slice_bytes`: of one rank's slices of all tensors, for which there is no need of more room.
  // Takes at most `most_bytes` from torch's allocator, at once, for the current stream of `device`;
  // only where that is not enough for kLeastRoom bytes of each peer does it take more.
  DeviceReducer(Reduction reduction, int rank, int world, std::vector<Tensor> tensors,
                size_t slice_bytes, size_t most_bytes, at::Device device);

  int landings() const override { return landings_; }
  size_t room() const override { return room_; }
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
  int landings_ = 1;
  size_t room_ = 0;
  at::Tensor memory_;  // the landings, each of a row for every peer
};

}  // namespace pg_sdma
