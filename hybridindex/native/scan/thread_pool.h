// Threads that help a caller with its work. No OpenMP: faiss and torch bring their own, and every thread that calls
// them gets a pool of its own there.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/types.h>

namespace hybridindex {

// Several callers may share a pool: each works on its own task, helpers go to the oldest that has work left.
class ThreadPool {
public:
    explicit ThreadPool(int n_helpers);
    // Joins the helpers. No run() may be going on.
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int n_helpers() const { return n_helpers_; }

    // Runs `help` on up to `n_helpers` helpers as they become free, and `lead` on the calling thread; returns when all
    // have returned. Neither may throw; each returns when nothing is left to be started. While it waits for the last helpers, the
    // caller runs `on_nudge` after each nudge().
    void run(int n_helpers, const std::function<void()>& help, const std::function<void()>& lead,
             const std::function<void()>& on_nudge);
    // Wakes callers that wait for their helpers.
    void nudge();

private:
    struct Task {
        const std::function<void()>* help;
        int wanted;
        int active = 0;
        bool open = true;
    };
    void serve();

    const int n_helpers_;
    // A child process has none of our threads: it works alone.
    const pid_t pid_;
    std::mutex mutex_;
    // Left behind in a child process: there they wait for ever to be rid of waiters that do not exist.
    std::unique_ptr<std::condition_variable> work_, left_;
    std::deque<Task*> tasks_;
    std::size_t nudges_ = 0;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace hybridindex
