// Add the reader's local time to the title of each time, which has the exact time in UTC.
import { onContent } from './live.js';

const format = new Intl.DateTimeFormat(undefined, { dateStyle: 'medium', timeStyle: 'long' });

onContent((root) => {
  for (const time of root.querySelectorAll('time[datetime]')) {
    const local = format.format(new Date(time.dateTime));
    const utc = time.title.split(' · ')[0];
    time.title = `${utc} · ${local}`;
  }
});
