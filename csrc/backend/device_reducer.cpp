#include "backend/device_reducer.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace pg_sdma {
namespace {

// Of a peer's slices, what lands at a time: the more pieces, the shorter the wait for the first one
// and the sum of the last, which nothing hides; the larger, the less their beginnings cost.
constexpr size_t kPieces = 8;
constexpr size_t kLeastPiece = size_t{1} << 20;
constexpr size_t kMostPiece = size_t{32} << 20;

// Rows begin at multiples of it: kernels::kStride elements of the largest dtype.
constexpr size_t kLeastRoom = kernels::kStride * sizeof(double);

}  // namespace

DeviceReducer::DeviceReducer(Reduction reduction, int rank, int world, std::vector<Tensor> tensors,
                             size_t slice_bytes, size_t most_bytes, at::Device device)
    : reduction_(reduction),
      rank_(rank),
      peers_(static_cast<size_t>(world) - 1),
      tensors_(std::move(tensors)),
      stream_(c10::impl::VirtualGuardImpl(device.type()).getStream(device)) {
  const size_t rows = kLandings * peers_;
  const size_t piece = std::clamp(slice_bytes / kPieces, kLeastPiece, kMostPiece);
  const size_t most = rows == 0 ? slice_bytes : std::min(piece, most_bytes / rows);
  const size_t needed = (slice_bytes + kLeastRoom - 1) / kLeastRoom * kLeastRoom;
  room_ = std::max(std::min(most / kLeastRoom * kLeastRoom, needed), kLeastRoom);
  if (rows == 0) room_ = std::max(needed, kLeastRoom);
  // One landing is enough for what lands all at once.
  const size_t landings = room_ == needed ? 1 : kLandings;
  memory_ = at::empty({static_cast<int64_t>(landings * peers_ * room_)},
                      at::TensorOptions().dtype(at::kByte).device(device));
}

std::byte* DeviceReducer::base(int which) const {
  return static_cast<std::byte*>(memory_.mutable_data_ptr()) +
         static_cast<size_t>(which) * peers_ * room_;
}

void* DeviceReducer::landing(int which, int peer) {
  return base(which) + static_cast<size_t>(peer < rank_ ? peer : peer - 1) * room_;
}

Launch DeviceReducer::launch(const Share& share, size_t offset, size_t bytes, int which,
                             size_t at) {
  const auto& [kernel, element] = tensors_[share.tensor];
  const uint64_t count = bytes / element;
  const auto address = [](const void* pointer) {
    return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(pointer));
  };
  const uint64_t blocks = (count + kernel.threads - 1) / kernel.threads;
  Launch launch;
  launch.function = kernel.function;
  launch.blocks = static_cast<unsigned>(std::min<uint64_t>(blocks, kernel.blocks));
  launch.threads = kernel.threads;
  launch.shared_bytes = kernel.shared_bytes;
  launch.arguments = {address(share.output) + offset,
                      address(share.slices[static_cast<size_t>(rank_)]) + offset,
                      address(base(which) + at),
                      room_ / element,
                      count,
                      std::bit_cast<uint64_t>(reduction_.factor)};
  return launch;
}

}  // namespace pg_sdma
