#include "backend/collectives/device_reducer.h"

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

// One fills while another is summed. More of them let the copies go on while no kernel can begin,
// because those of a large multiplication have every processor.
constexpr size_t kWantedLandings = 2;

}  // namespace

LandingShape landing_shape(size_t slice_bytes, size_t most_bytes, size_t peers) {
  const size_t slices = (slice_bytes + kLeastRoom - 1) / kLeastRoom * kLeastRoom;
  const size_t needed = std::max(slices, kLeastRoom);
  if (peers == 0) return {needed, 1};
  const size_t a_peer = most_bytes / peers;
  const size_t piece = std::clamp(slice_bytes / kPieces, kLeastPiece, kMostPiece);
  const size_t most = std::min(piece, a_peer / kWantedLandings) / kLeastRoom * kLeastRoom;
  const size_t room = std::clamp(most, kLeastRoom, needed);
  // No more than there are pieces: one is enough for what lands all at once.
  const size_t pieces = (needed + room - 1) / room;
  return {room, static_cast<int>(std::min(pieces, std::max<size_t>(a_peer / room, 1)))};
}

DeviceReducer::DeviceReducer(Reduction reduction, int rank, int world, std::vector<Tensor> tensors,
                             size_t slice_bytes, size_t most_bytes, at::Device device)
    : reduction_(reduction),
      rank_(rank),
      peers_(static_cast<size_t>(world) - 1),
      tensors_(std::move(tensors)),
      stream_(c10::impl::VirtualGuardImpl(device.type()).getStream(device)),
      shape_(landing_shape(slice_bytes, most_bytes, peers_)) {
  memory_ =
      at::empty({static_cast<int64_t>(static_cast<size_t>(shape_.count) * peers_ * shape_.room)},
                at::TensorOptions().dtype(at::kByte).device(device));
}

std::byte* DeviceReducer::base(int which) const {
  return static_cast<std::byte*>(memory_.mutable_data_ptr()) +
         static_cast<size_t>(which) * peers_ * shape_.room;
}

void* DeviceReducer::landing(int which, int peer) {
  return base(which) + static_cast<size_t>(peer < rank_ ? peer : peer - 1) * shape_.room;
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
                      shape_.room / element,
                      count,
                      std::bit_cast<uint64_t>(reduction_.factor)};
  return launch;
}

}  // namespace pg_sdma
