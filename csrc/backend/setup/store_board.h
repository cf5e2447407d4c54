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

#include "transport/setup/rendezvous.h"

namespace pg_sdma {

class StoreBoard final : public Board {
 public:
  // `cancelled` says why to wait no longer; empty: go on.
  StoreBoard(c10::intrusive_ptr<c10d::Store> store, std::function<std::string()> cancelled)
      : store_(std::move(store)), cancelled_(std::move(cancelled)) {}

  void post(const std::string& key, const std::string& value) override {
    store_->set(full(key), value);
  }

  std::string claim(const std::string& key, const std::string& value) override {
    return store_->compareSet(full(key), "", value);
  }

  // Asks again and again: a Store's own wait can neither be cancelled nor let another thread in.
  bool await(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) override {
    const std::vector<std::string> all = full(keys);
    const auto deadline = Clock::now() + timeout;
    for (std::chrono::milliseconds pause{1};; pause = std::min(2 * pause, kMostPause)) {
      if (store_->check(all)) return true;
      if (Clock::now() >= deadline) return false;
      if (const std::string why = cancelled_(); !why.empty()) throw std::runtime_error(why);
      std::this_thread::sleep_for(pause);
    }
  }

  std::vector<std::string> get(const std::vector<std::string>& keys) override {
    std::vector<std::string> values;
    for (const auto& value : store_->multiGet(full(keys))) {
      values.emplace_back(value.begin(), value.end());
    }
    return values;
  }

  // A Store's own get waits for the key. This one asks to replace what no key holds, which returns
  // what the key holds; and where there is none, what it was asked to replace.
  std::optional<std::string> peek(const std::string& key) override {
    const std::string none = "?";
    std::string value = store_->compareSet(full(key), none, none);
    return value == none ? std::nullopt : std::optional(std::move(value));
  }

  void remove(const std::string& key) override {
    try {
      store_->deleteKey(full(key));
    } catch (const std::exception&) {
      // A Store of the program's own may not have it. Where the store has gone, what is asked of it
      // next says so.
    }
  }

  int64_t count(const std::string& key) override { return store_->add(full(key), 1); }

 private:
  static std::string full(const std::string& key) { return "sdma/" + key; }
  static std::vector<std::string> full(std::vector<std::string> keys) {
    for (std::string& key : keys) key = full(key);
    return keys;
  }

  static constexpr std::chrono::milliseconds kMostPause{50};

  c10::intrusive_ptr<c10d::Store> store_;
  std::function<std::string()> cancelled_;
};

}  // namespace pg_sdma
