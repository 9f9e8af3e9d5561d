// Listeners: who wants to be told of something; all since a mark can be forgotten.

export class Listeners<T extends unknown[]> {
  private readonly all: ((...what: T) => void)[] = [];

  add(listener: (...what: T) => void): void {
    this.all.push(listener);
  }

  tell(...what: T): void {
    for (const listener of [...this.all]) listener(...what);
  }

  mark(): number {
    return this.all.length;
  }

  forget(mark: number): void {
    this.all.length = mark;
  }
}
