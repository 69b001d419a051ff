// Threads that help a caller with its work. No caller ever waits for one of them: it may have lost its core. No OpenMP:
// faiss and torch bring their own, and every thread that calls them gets a pool of its own there.
#pragma once
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include <semaphore.h>
#include <sys/types.h>

namespace hybridindex {

// Safe to use from several threads at once. Neither callers nor helpers take a lock.
class ThreadPool {
public:
    // What one caller wants help with. It must stay until `inside` is 0.
    class Work {
    public:
        // On a helper's thread. Returns when nothing is left to be started; must not throw.
        virtual void help() = 0;
        // Helpers that were asked and have neither left nor been taken back.
        int inside() const { return inside_.load(std::memory_order_acquire); }

    protected:
        ~Work() = default;

    private:
        friend class ThreadPool;
        std::atomic<int> inside_{0};
    };

    explicit ThreadPool(int n_helpers);
    // Joins the helpers; in a child process, which has none of them, it lets go of nothing that is theirs.
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int n_helpers() const { return n_helpers_; }

    // Asks up to `most` idle helpers and returns how many were found; a helper begins when it gets a core.
    int ask(Work& work, int most);
    bool has_idle() const { return idle_.load(std::memory_order_relaxed) > 0; }
    // Helpers that have not begun will not.
    void take_back(Work& work);

protected:
    // Joins the helpers, once.
    void stop();

private:
    struct alignas(64) Helper {
        std::atomic<Work*> work{nullptr};  // what it is asked to do, or that it does something
        sem_t asked;
        std::thread thread;
    };
    void serve(Helper& self);

    const int n_helpers_;
    // A child process has none of our threads: it works alone.
    const pid_t pid_;
    std::atomic<int> idle_;
    std::atomic<bool> stop_{false};
    std::unique_ptr<Helper[]> helpers_;
};

}  // namespace hybridindex
