// A group as all its lanes know it, with the settings that it was made with.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace pg_sdma {

// From which size on calls go direct where a machine was tuned; none: not measured.
struct TunedBounds {
  std::optional<uint64_t> min_bytes, min_sum_bytes, min_mean_bytes;  // as in Policy
  std::string text;  // the same in words: must be equal on all ranks
};

// The settings of src/pg_sdma/settings.py, which declares and documents them, as C++ needs them.
struct Settings {
  bool enabled = true;
  bool all_gathers = true;       // go direct
  bool reduce_scatters = false;  // go direct
  uint64_t landing_bytes = uint64_t{64} << 20;
  std::string no_device_sums;         // why reduce-scatters of device tensors cannot go direct
  std::optional<uint64_t> min_bytes;  // none: what was tuned, or the engine's default
  std::map<c10::DeviceType, TunedBounds> tuned;
  std::optional<double> patience_ms;  // none: the engine's default
  bool slots = true;
  bool defer = true;  // all-gathers for which ranks are late
  std::vector<c10::DeviceType> peer_copies_on{c10::kCPU, c10::kCUDA};  // the lanes that may copy
  std::vector<c10::DeviceType> mori_on;  // the lanes that mori may serve
  std::string no_mori;                   // why mori serves none, where it was asked for
  uint64_t mori_bytes = 0;               // of its memory on each device
  bool whole_job = true;                 // the group has every rank of the job
  bool strict = false;
  bool let_peers_read = true;
  uint64_t ring = 16;
  bool allow_same_device = false;
  bool allow_pcie = false;
  bool hip = false;    // torch was built for ROCm: "cuda" means HIP
  std::string driver;  // library to open instead of the vendor's
  uint64_t trace_entries = 0;
  std::string trace_file;  // where a broken group's flight record goes; empty: nowhere
  std::string agreed;      // what must be equal on all ranks, as text
};

// What the lanes of a group share.
struct Group {
  int rank = 0;
  int size = 1;
  std::string name;
  c10::intrusive_ptr<c10d::Store> store;
  Settings settings;
  std::chrono::milliseconds timeout{0};
  std::vector<int> global_ranks;  // of all ranks
};

}  // namespace pg_sdma
