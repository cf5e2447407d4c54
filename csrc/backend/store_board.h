// The vote's keys on the group's c10d store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/rendezvous.h"

namespace pg_sdma {

class StoreBoard final : public Board {
 public:
  // `cancelled` says why to wait no longer; empty: go on.
  StoreBoard(c10::intrusive_ptr<c10d::Store> store, std::function<std::string()> cancelled)
      : store_(std::move(store)), cancelled_(std::move(cancelled)) {}

  void post(const std::string& key, const std::string& value) override {
    store_->set("sdma/" + key, value);
  }

  // Asks again and again: a Store's own wait can neither be cancelled nor let another thread in.
  std::vector<std::optional<std::string>> collect(const std::vector<std::string>& keys,
                                                  std::chrono::milliseconds timeout) override {
    std::vector<std::string> full;
    for (const std::string& key : keys) full.push_back("sdma/" + key);
    const auto deadline = Clock::now() + timeout;
    for (std::chrono::milliseconds pause{1}; !store_->check(full) && Clock::now() < deadline;
         pause = std::min(2 * pause, kMostPause)) {
      if (const std::string why = cancelled_(); !why.empty()) throw std::runtime_error(why);
      std::this_thread::sleep_for(pause);
    }
    std::vector<std::optional<std::string>> values;
    for (const std::string& key : full) {
      values.push_back(store_->check({key}) ? std::optional(store_->get_to_str(key))
                                            : std::nullopt);
    }
    return values;
  }

 private:
  static constexpr std::chrono::milliseconds kMostPause{50};

  c10::intrusive_ptr<c10d::Store> store_;
  std::function<std::string()> cancelled_;
};

}  // namespace pg_sdma
